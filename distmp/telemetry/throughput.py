"""Measure the time per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
