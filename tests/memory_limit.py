"""Limits and measures the memory of the process that calls it."""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path


def limit_memory(more: int) -> None:
    """Let this process allocate at most `more` further bytes of private memory.

    Freed tensors are returned to the system, as with the environment variables `EXACT_MALLOC`.
    """
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD
    # The stack of a thread counts in full, 8 MiB, and a rank has a dozen threads.
    attributes = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(2**19))
    assert libc.pthread_setattr_default_np(attributes) == 0
    limit = 1024 * status("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def status(field: str) -> int:
    """Return a field of /proc/self/status, in KiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def reset_peak() -> None:
    """Set VmHWM, the peak of resident memory, to VmRSS; see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")
