"""Measures how long this rank waits for the others in collectives.

Ranks end a step together, so all of them seem as slow as the slowest. The time that they wait
distinguishes them: the slowest rank waits least.
"""

# Note [Waits on CUDA streams]
#
# `Work.wait` makes the current stream wait. If that is the stream that computes, the rank waits. If
# it is a side stream, the collective overlaps with computation, and may take longer than a step
# without delaying it. So the code that runs a side stream records no waits there (`on_side_stream`)
# and records how long the computing stream waits for it (`measured`).
# FSDP runs its side streams itself: there, waits are recorded although they overlap, and
# `distmp.training.callbacks.stragglers` counts only their excess over the rank that waits least.

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Start and stop, in any unit of time.
Interval = tuple[float, float]


class TimePoint:
    """A point in time on the host, or on the current stream of a CUDA device.

    Args:
        device: The CPU takes the time of the host, a CUDA device that of its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_past(self) -> bool:
        """Whether the device has reached this point."""
        return self._event is None or self._event.query()

    def seconds_until(self, later: TimePoint) -> float:
        """Return the seconds until a later point on the same device; both must be past."""
        if self._event is None or later._event is None:
            return later._host - self._host
        return self._event.elapsed_time(later._event) / 1000


Span = tuple[TimePoint, TimePoint]


class CollectiveWaits:
    """Records when this rank waits for collectives.

    Attributes:
        active: Whether waits are recorded. While False, collectives are not wrapped.
    """

    def __init__(self) -> None:
        self.active = False
        self._spans: list[Span] = []

    def watch(self, work: dist.Work, tensor: Tensor) -> dist.Work:
        """Return the work of a collective; while active, its `wait` is recorded."""
        return _TimedWork(work, tensor.device, self._spans) if self.active else work

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Do not record waits for collectives that start inside of the context."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    @contextlib.contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        """While active, record the time that the current stream of a device needs for the context.

        See Note [Waits on CUDA streams].
        """
        begin = TimePoint(device) if self.active else None
        yield
        if begin is not None:
            self._spans.append((begin, TimePoint(device)))

    def take(self) -> list[Span]:
        """Return the waits recorded since the last call: when each began and ended."""
        spans = self._spans.copy()
        self._spans.clear()
        return spans


class _TimedWork(dist.Work):
    """The work of a collective that records when it is waited for."""

    def __init__(self, work: dist.Work, device: torch.device, spans: list[Span]) -> None:
        super().__init__()
        self._work = work
        self._device = device
        self._spans = spans

    def wait(self, *timeout: timedelta) -> bool:
        begin = TimePoint(self._device)
        done: Any = self._work.wait(*timeout)
        self._spans.append((begin, TimePoint(self._device)))
        return done


collective_waits = CollectiveWaits()
"""The recorder of this process."""


# The median over this many steps is reported.
STEPS = 5


class ComputeTime(NamedTuple):
    """Times of a rank between two decisions, in seconds.

    Attributes:
        between: Time from the end of one decision to the start of the next.
        waited: The part of `between` that the rank waited in collectives, at most all of it.
    """

    between: float
    waited: float


class _Interval(NamedTuple):
    begin: TimePoint
    end: TimePoint
    waits: list[Span]

    @property
    def is_past(self) -> bool:
        """Whether the device has reached the end of the interval and of its waits."""
        return self.end.is_past and all(end.is_past for _, end in self.waits)

    def compute_time(self) -> ComputeTime:
        """Return the times of the interval, which must be past."""
        between = self.begin.seconds_until(self.end)
        waits = (
            (self.begin.seconds_until(begin), self.begin.seconds_until(end))
            for begin, end in self.waits
        )
        # Sums are rounded: never more than `between`.
        return ComputeTime(between, min(overlap(waits, [(0.0, between)]), between))


class StepClock:
    """Measures the compute time of steps.

    Args:
        device: The device that computes the steps.

    Attributes:
        active: Whether the clock measures. On CUDA this costs two events per step, and two per wait
            for a collective.
    """

    def __init__(self, device: torch.device) -> None:
        self.active = False
        self._device = device
        self._begin: TimePoint | None = None
        self._intervals: deque[_Interval] = deque(maxlen=STEPS)

    def begin(self) -> None:
        """Start an interval, at the end of a decision."""
        collective_waits.active = self.active
        collective_waits.take()
        self._begin = TimePoint(self._device) if self.active else None

    def end(self) -> None:
        """End the interval, at the start of the next decision."""
        if self._begin is not None:
            waits = collective_waits.take()
            self._intervals.append(_Interval(self._begin, TimePoint(self._device), waits))
            self._begin = None

    def drop_last(self) -> None:
        """Discard the last interval, which contains more than a step."""
        if self._intervals:
            self._intervals.pop()

    def take(self) -> ComputeTime | None:
        """Return the median of the intervals that are past on the device; None without any."""
        past = [interval.compute_time() for interval in self._intervals if interval.is_past]
        self._intervals.clear()
        past.sort(key=lambda time: time.between - time.waited)
        return past[(len(past) - 1) // 2] if past else None


def overlap(*inside: Iterable[Interval], without: Iterable[Interval] = ()) -> float:
    """Return how long some interval of each set is open and none of `without`, in their unit.

    Args:
        *inside: Sets of intervals, which may be unsorted and overlap.
        without: Intervals that do not count.
    """
    sets = (*inside, without)
    changes = sorted(
        change
        for index, spans in enumerate(sets)
        for start, stop in spans
        if start < stop
        for change in ((start, index, 1), (stop, index, -1))
    )
    opened = [0] * len(sets)
    total = before = 0.0
    for moment, index, change in changes:
        if all(opened[:-1]) and not opened[-1]:
            total += moment - before
        opened[index] += change
        before = moment
    return total
