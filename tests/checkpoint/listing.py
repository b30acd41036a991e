"""Lists the checkpoints in a directory, and reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.storage import entries_of, is_checkpoint


def latest(directory: Path) -> Path | None:
    """Return the checkpoint of the highest step in `directory`, or None if there is none."""
    by_step = checkpoints(directory)
    return by_step[max(by_step)] if by_step else None


def checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `directory` by step, in ascending order."""
    by_step: dict[int, Path] = {}
    for entry in entries_of(directory):
        if entry.finished and entry.step not in by_step and is_checkpoint(entry.path):
            by_step[entry.step] = entry.path
    return dict(sorted(by_step.items()))


def final_state(run: Path) -> dict[str, Tensor]:
    """Return all tensors of the last checkpoint of a run."""
    checkpoint = latest(run / "checkpoints")
    assert checkpoint is not None, f"{run} has no checkpoint"
    tensors = StoredCheckpoint(checkpoint).tensors.items()
    found = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in tensors}
    StoredCheckpoint(checkpoint).load(found)
    return found
