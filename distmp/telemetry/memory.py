"""How much memory a rank has needed."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has used at once, in bytes.

    On a CUDA device: the peak of what tensors occupied since the start of the process or the last
    `torch.cuda.reset_peak_memory_stats`; the allocator's cache and memory taken by libraries come
    on top of it. Elsewhere: the largest resident set of the process, which counts the interpreter
    and libraries too, and cannot be reset. Does not wait for the device.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def begin_peak(device: torch.device) -> int:
    """Free what nobody uses, forget the peak before, and return the bytes in use.

    On a CUDA device those of tensors, elsewhere the resident set of the process (Linux).
    """
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()  # before it there are no statistics to reset
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_since(start: int, device: torch.device) -> int:
    """Return how many bytes more than `start` were in use at the most since `begin_peak`."""
    if device.type == "cuda":
        return peak_memory_bytes(device) - start
    return _status("VmHWM") - start


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
