"""Traces of chosen steps by torch's profiler, and how much communication they hide."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distmp.telemetry.settings import ProfileConfig

# Microseconds from and to.
Interval = tuple[float, float]

COMMUNICATION = ("gloo:", "nccl")


class Overlap(NamedTuple):
    """Time that a rank's communication took in a trace, in seconds.

    Attributes:
        total: While any collective ran.
        hidden: While backward (or any other kernel, on CUDA) ran at the same time.
    """

    total: float
    hidden: float

    def __str__(self) -> str:
        share = f", {self.hidden / self.total:.0%} of it during computation" if self.total else ""
        return f"{1000 * self.total:.3g} ms of communication{share}"


class StepProfiler:
    """Records the steps that a configuration names.

    Args:
        config: Which steps.
        directory: Where the traces go, made when there is one: `trace-rank0.json` and so on, in
            the format of Chrome and Perfetto.
        rank: This rank.
    """

    def __init__(self, config: ProfileConfig, directory: Path, rank: int) -> None:
        self._config = config
        self.path = directory / f"trace-rank{rank}.json"
        self._running: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start to record if `step`, counted from 1, is the first one wanted."""
        if self._config.first_step == step:
            self._running = torch.profiler.profile(record_shapes=True)
            self._running.start()

    def after(self, step: int) -> Overlap | None:
        """Write the trace if `step` was the last one wanted; return how much was hidden."""
        last = self._config.first_step + self._config.steps - 1
        if self._running is None or step < last:
            return None
        return self.close()

    def close(self) -> Overlap | None:
        """Write what was recorded, if anything; a run may end before the last step wanted."""
        if self._running is None:
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._running.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self.path))
        self._running = None
        return overlap(json.loads(self.path.read_text())["traceEvents"])


def overlap(events: Iterable[dict[str, Any]]) -> Overlap:
    """Measure communication in the events of a trace of one rank.

    On CUDA communication is what NCCL's kernels do, and it is hidden behind any other kernel. On a
    CPU it is what gloo's threads do, and it is hidden behind backward.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    if kernels:
        communication = [event for event in kernels if _communicates(event)]
        computation = [event for event in kernels if not _communicates(event)]
    else:
        communication = [event for event in complete if _communicates(event)]
        computation = [
            event for event in complete if "autograd::engine::evaluate_function" in event["name"]
        ]
    collectives, computing = _union(communication), _union(computation)
    total = sum(stop - start for start, stop in collectives)
    return Overlap(total / 1e6, _common(collectives, computing) / 1e6)


def _communicates(event: dict[str, Any]) -> bool:
    return str(event["name"]).lower().startswith(COMMUNICATION)


def _union(events: Iterable[dict[str, Any]]) -> list[Interval]:
    """Return the times in which any of the events ran, in order and without overlap."""
    found: list[Interval] = []
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def _common(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return how long two unions ran at the same time."""
    return sum(
        max(0.0, min(stop, other_stop) - max(start, other_start))
        for start, stop in first
        for other_start, other_stop in second
    )
