"""Measures the time that a rank itself takes for a step, without waiting for other ranks.

The interval begins at the end of a decision, which all ranks reach together, and ends at the start
of the next one. It contains the update, loading data, forward and backward. Waits for collectives
within it are measured separately; waits of several streams at the same time count once. On CUDA
these are times of the device, read once they are past: the host does not wait for them.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

import torch

from distmp.distributed.waiting import Span, TimePoint, collective_waits
from distmp.utils.intervals import intersection, length, union

# The median over this many steps is reported.
STEPS = 5


class OwnTime(NamedTuple):
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

    def own_time(self) -> OwnTime:
        """Return the times of the interval, which must be past."""
        between = self.begin.seconds_until(self.end)
        waits = union(
            (self.begin.seconds_until(begin), self.begin.seconds_until(end))
            for begin, end in self.waits
        )
        # Sums are rounded: never more than `between`.
        return OwnTime(between, min(length(intersection(waits, [(0.0, between)])), between))


class StepClock:
    """Measures the own time of steps.

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

    def take(self) -> OwnTime | None:
        """Return the median of the intervals that are past on the device; None without any."""
        past = [interval.own_time() for interval in self._intervals if interval.is_past]
        self._intervals.clear()
        if not past:
            return None
        median = statistics.median_low([time.between - time.waited for time in past])
        return next(time for time in past if time.between - time.waited == median)
