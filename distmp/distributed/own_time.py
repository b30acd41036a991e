"""The time of a step that is a rank's own: without waiting for others.

It is measured from the end of one decision, which all ranks reach together, to the beginning of the
next one; what lies between is the update, the data, forward and backward. Waiting for collectives
in between is taken apart. On CUDA these are times of the device, read when they are past: the host
does not wait for them.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

import torch

from distmp.distributed.waiting import Moment, Span, waiting

# As many steps are looked at together; the middle one counts.
STEPS = 5


class OwnTime(NamedTuple):
    """Times of a rank between two decisions, in seconds.

    Attributes:
        between: From the one to the other.
        waited: Of that, in collectives.
    """

    between: float
    waited: float


class _Interval(NamedTuple):
    begin: Moment
    end: Moment
    waits: list[Span]


class StepClock:
    """Measures the own time of steps, while it is asked to.

    Args:
        device: Where steps are computed.

    Attributes:
        active: Whether it measures. It costs two events a step, and two for each collective.
    """

    def __init__(self, device: torch.device) -> None:
        self.active = False
        self._device = device
        self._begin: Moment | None = None
        self._intervals: deque[_Interval] = deque(maxlen=STEPS)

    def begin(self) -> None:
        """Note that a decision has been reached."""
        waiting.active = self.active
        waiting.take()
        self._begin = Moment(self._device) if self.active else None

    def end(self) -> None:
        """Note that this rank is ready for the next decision."""
        if self._begin is not None:
            self._intervals.append(_Interval(self._begin, Moment(self._device), waiting.take()))
            self._begin = None

    def drop_last(self) -> None:
        """Leave out the last step: something else came between."""
        if self._intervals:
            self._intervals.pop()

    def take(self) -> OwnTime | None:
        """Return the middle of the last steps that are past on the device; None without any."""
        past = [
            OwnTime(
                interval.begin.until(interval.end),
                sum(before.until(after) for before, after in interval.waits),
            )
            for interval in self._intervals
            if interval.end.is_past and all(after.is_past for _, after in interval.waits)
        ]
        self._intervals.clear()
        if not past:
            return None
        middle = statistics.median_low([time.between - time.waited for time in past])
        return next(time for time in past if time.between - time.waited == middle)
