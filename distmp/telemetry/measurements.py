"""Measurements of steps: throughput, memory, and operands of low-precision matmuls."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmp.engine.low_precision_matmuls import MatmulStatistics
from distmp.quantization.linear import OPERANDS
from distmp.quantization.operands import STATISTICS
from distmp.utils.processes import return_freed_memory


class StepTimer:
    """Measures each step from the end of the previous one, so that all time is counted.

    It reads a monotonic clock on the host, does not smooth, and does not synchronize with a device:
    single steps look short while kernels are queued, but the total over many steps is right.

    Args:
        clock: Returns seconds; monotonic.

    Attributes:
        paused_seconds: Pauses since the end of the last step, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self.paused_seconds = 0.0

    def lap(self) -> float:
        """End a step and start the next; return the duration of the step in seconds, above 0."""
        now = self._clock()
        # A coarse clock may not have advanced.
        seconds = max(now - self._started, 1e-9)
        self._started = now
        self.paused_seconds = 0.0
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside of the block, such as a validation, from the step."""
        started, begin = self._started, self._clock()
        try:
            yield
        finally:
            pause = self._clock() - begin
            self._started = started + pause
            self.paused_seconds += pause


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process, in bytes.

    On a CUDA device: the peak memory of tensors since the start of the process or the last
    `torch.cuda.reset_peak_memory_stats`, without the allocator's cache and the memory of libraries.
    Elsewhere: the peak resident set of the process, which includes the interpreter and libraries
    and cannot be reset. Does not synchronize with the device.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def begin_peak(device: torch.device) -> int:
    """Free unused memory, reset the peak, and return the number of bytes in use.

    On a CUDA device these are the bytes of tensors, elsewhere the resident set (Linux only).
    """
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
    peak = peak_memory_bytes(device) if device.type == "cuda" else _status("VmHWM")
    return peak - start


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


LARGEST, SATURATED, UNDERFLOWED, ELEMENTS = range(len(STATISTICS))


def summarize(statistics: MatmulStatistics) -> dict[str, dict[str, Any]]:
    """Wait for the step, and return the statistics of each low-precision operand.

    Returns:
        For each of `OPERANDS`: "saturated", the share of the values that are saturated or not
        finite; "underflowed", the share that was rounded to zero; "largest", the largest magnitude
        on this rank; "most_saturated" and "most_underflowed", the "layer" with the largest "share",
        or None if all shares are 0.
    """
    by_operand = zip(OPERANDS, statistics.read().unbind(1), strict=True)
    summaries = {operand: _summary(part, statistics.layers) for operand, part in by_operand}
    return {operand: summary for operand, summary in summaries.items() if summary}


def _summary(values: Tensor, layers: Sequence[str]) -> dict[str, Any]:
    """Summarize the statistics of an operand, FP64 [layers, 4]; empty for high precision."""
    _, saturated, underflowed, elements = values.sum(0).tolist()
    if elements == 0:
        return {}
    return {
        "saturated": saturated / elements,
        "underflowed": underflowed / elements,
        "largest": values[:, LARGEST].amax().item(),
        "most_saturated": _worst(values, SATURATED, layers),
        "most_underflowed": _worst(values, UNDERFLOWED, layers),
    }


def _worst(values: Tensor, statistic: int, layers: Sequence[str]) -> dict[str, Any] | None:
    shares = values[:, statistic] / values[:, ELEMENTS].clamp(min=1)
    share, layer = shares.max(0)
    return {"layer": layers[int(layer)], "share": share.item()} if share > 0 else None
