"""How much memory a rank has needed."""

from __future__ import annotations

import resource
import sys
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
