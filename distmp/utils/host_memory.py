"""Makes the C library return the memory of freed tensors."""

from __future__ import annotations

import ctypes
import functools

# mallopt's M_MMAP_THRESHOLD, see malloc.h of glibc.
_MMAP_THRESHOLD = -3
# Larger allocations are mapped one by one, and unmapped when they are freed. It is the value with
# which glibc starts.
_MAPPED_BYTES = 2**17


@functools.cache
def return_freed_memory() -> None:
    """Let glibc return the memory of large freed tensors to the system, in this process.

    After the first large tensor is freed, glibc takes tensors of up to 32 MiB from its heap, which
    only shrinks at its end. Gathered parameters that come and go leave gaps in it, so a process can
    hold several times the memory of its tensors. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
