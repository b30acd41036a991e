"""Makes the C library return the memory of freed tensors."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return memory that glibc keeps for later allocations to the system.

    glibc keeps freed tensors of up to 32 MiB in its heap, and steps use them again. What the start
    of a run or a load has freed is more than a step needs. Takes milliseconds, so call it once and
    not in every step. Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
