"""torch's own recording of CUDA memory, with the stack of each allocation.

Its functions have private names: here alone they are used, and only where torch has them. Seen with
torch 2.11 and 2.13.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Each with its stack takes about a kilobyte.
MOST_EVENTS = 100_000

_record: Any = getattr(torch.cuda.memory, "_record_memory_history", None)
_dump: Any = getattr(torch.cuda.memory, "_dump_snapshot", None)

AVAILABLE = _record is not None and _dump is not None
"""Whether this release of torch can do it."""


def start() -> None:
    """Begin to record what is allocated and given back, with Python's stack."""
    if AVAILABLE:
        _record(enabled="all", context="all", stacks="python", max_entries=MOST_EVENTS)


def write(path: Path) -> None:
    """Write what was recorded, for https://pytorch.org/memory_viz.

    Raises:
        OSError: If it cannot be written.
    """
    if AVAILABLE:
        _dump(str(path))


def stop() -> None:
    """End to record."""
    if AVAILABLE:
        _record(enabled=None)
