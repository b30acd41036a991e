"""Saves and loads checkpoints: tensors, sharded or not, and a few numbers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distmp.checkpoint import dcp, manifest
from distmp.checkpoint.layout import final_path, tidy
from distmp.checkpoint.manifest import HEALTHY, STATE_FILE, FileSum, Health
from distmp.checkpoint.recovery import Usable, newest_healthy, resolve, usable
from distmp.checkpoint.settings import Retention
from distmp.checkpoint.storage import (
    INDEX_FILE,
    LocalStorage,
    rank_0_or_checkpoint_error,
    synchronize,
)
from distmp.checkpoint.stored import StoredCheckpoint
from distmp.distributed.ranks import Ranks
from distmp.errors import CheckpointError, listed
from distmp.utils.files import PRIVATE

__all__ = [
    "Retention",
    "StoredCheckpoint",
    "Usable",
    "final_path",
    "newest_healthy",
    "resolve",
    "save",
    "usable",
]


logger = logging.getLogger("distmp")


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    keep: int | Retention,
    *,
    group: dist.ProcessGroup | None = None,
    permit: Callable[[], None] = lambda: None,
    finite: Collection[str] = (),
    health: Health = HEALTHY,
) -> Path:
    """Write the checkpoint of `step` and make it the latest. Collective over all ranks.

    The checkpoint is atomic: it appears completely, under its final name, or not at all. A
    checkpoint of the same step is replaced. Later ones, from before the run returned to an
    earlier step, are set aside; see `storage`.

    An unhealthy state is written, too, for examination, and marked in `state.json`. It never
    displaces a healthy one, and `recovery` skips it. A state that was saved after a skipped step
    does not displace other ones, either, until an update follows: if the next steps are skipped,
    too, its weights are unhealthy.

    May run in another thread, if nothing else uses `group` meanwhile.

    Args:
        directory: Directory of the run's checkpoints, on storage that all ranks share.
        step: Number of steps done.
        tensors: Tensors of any shape, dtype and device, by name: DTensors and flat shards, of
            which every rank writes its part, and plain tensors, which are equal on all ranks. A
            rank may omit tensors that other ranks write.
        numbers: Values that JSON can represent. Those of rank 0 are written.
        keep: Number of latest checkpoints to keep, 1 or more, or all rules of retention.
        group: Group of all ranks, used for the collectives. None: the default group.
        permit: Raises if this job must not write any more. Called on rank 0, before anything is
            written and before the checkpoint appears.
        finite: Names of tensors that hold only finite values in a healthy state.
        health: Whether a run should continue from the state. The value of rank 0 counts.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: The same on all ranks, if any of them failed. Earlier checkpoints are
            unchanged.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from distmp.checkpoint import store
        >>> path = store.save(Path("saved"), 7, {"average": torch.ones(3)}, {"epoch": 1}, keep=2)
        >>> path.name
        'step-000007'
    """
    retention = Retention(keep) if isinstance(keep, int) else keep
    ranks = Ranks(group)
    goal = f"save {final_path(directory, step)}"

    def begin() -> str:
        permit()
        return _begin(directory, step, numbers)

    writing = directory / rank_0_or_checkpoint_error(ranks, goal, begin)
    written = ranks.gather(dcp.write(goal, writing, tensors, ranks, finite))
    files = {name: file for rank in written for name, file in rank.sums.items()}
    files[INDEX_FILE] = files.pop(INDEX_FILE)  # last, after one data file of each rank

    non_finite = sorted({name for rank in written for name in rank.non_finite})
    if non_finite:
        health = health._replace(problem=f"NaN or infinite values in {listed(non_finite)}")

    def finish() -> str:
        permit()
        state = manifest.encode(step, numbers, files, health, retention.best)
        final = _finish(directory, writing, state, files)
        tidy(directory, step, retention)
        _report_mark(final, health.problem)
        return final.name

    return directory / rank_0_or_checkpoint_error(ranks, goal, finish)


def _report_mark(path: Path, problem: str | None) -> None:
    if problem is not None:
        logger.warning(
            "%s is marked as unhealthy: %s; it does not count for checkpoint.keep, and --resume "
            "auto and rollbacks skip it",
            path,
            problem,
        )


def _begin(directory: Path, step: int, numbers: dict[str, Any]) -> str:
    manifest.encode(step, numbers, {})  # raises before anything is written
    return LocalStorage(directory).prepare(step).name


def _finish(directory: Path, writing: Path, state: bytes, files: dict[str, FileSum]) -> Path:
    for name, written in files.items():
        try:
            manifest.check_size(writing / name, written)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} (all hosts must write to the same, shared storage)"
            ) from error
    file = writing / STATE_FILE
    # It contains the configuration of the run.
    with open(file, "wb", opener=partial(os.open, mode=PRIVATE)) as stream:
        stream.write(state)
    synchronize(file)
    return LocalStorage(directory).publish(writing)
