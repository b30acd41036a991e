"""Measure the peak memory of a rank."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from distmp.utils.host_memory import return_freed_memory

if TYPE_CHECKING:
    import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process, in bytes.

    On a CUDA device: the peak memory of tensors since the start of the process or the last
    `torch.cuda.reset_peak_memory_stats`, without the allocator's cache and the memory of libraries.
    Elsewhere: the peak resident set of the process, which includes the interpreter and libraries
    and cannot be reset. Does not synchronize with the device.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def begin_peak(device: torch.device) -> int:
    """Free unused memory, reset the peak, and return the number of bytes in use.

    On a CUDA device these are the bytes of tensors, elsewhere the resident set (Linux only).
    """
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()  # statistics cannot be reset before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_since(start: int, device: torch.device) -> int:
    """Return the peak memory since `begin_peak` minus `start`, in bytes."""
    if device.type == "cuda":
        return peak_memory_bytes(device) - start
    return _status("VmHWM") - start


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
