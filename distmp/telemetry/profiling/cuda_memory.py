"""Record CUDA memory with torch, with the stack of each allocation.

torch's functions for this are private: only this file uses them, and only if they exist. Tested
with torch 2.11 and 2.13.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# An event with its stack takes about a kilobyte.
MAX_EVENTS = 100_000

_record: Any = getattr(torch.cuda.memory, "_record_memory_history", None)
_dump: Any = getattr(torch.cuda.memory, "_dump_snapshot", None)

AVAILABLE = _record is not None and _dump is not None
"""Whether this version of torch has these functions."""


def start() -> None:
    """Start recording allocations and frees with Python stacks."""
    if AVAILABLE:
        _record(enabled="all", context="all", stacks="python", max_entries=MAX_EVENTS)


def write(path: Path) -> None:
    """Write a snapshot for https://pytorch.org/memory_viz.

    Raises:
        OSError: If the file cannot be written.
    """
    if AVAILABLE:
        _dump(str(path))


def stop() -> None:
    """Stop recording."""
    if AVAILABLE:
        _record(enabled=None)
