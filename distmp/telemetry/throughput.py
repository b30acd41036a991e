"""Time per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Measures each step from the end of the one before it, so that no time goes uncounted.

    Reads a monotonic clock on the host, does not smooth and does not wait for a device: while
    kernels queue up single steps look short, but over many steps the times add up.

    Args:
        clock: Returns seconds; never goes back.

    Attributes:
        paused_seconds: Pauses since the end of the last step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self.paused_seconds = 0.0

    def lap(self) -> float:
        """End a step and begin the next; return the seconds that it took, above 0."""
        now = self._clock()
        # Coarse clocks may not have moved.
        seconds = max(now - self._started, 1e-9)
        self._started = now
        self.paused_seconds = 0.0
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent inside the block out of the step: validation, for one."""
        started, begin = self._started, self._clock()
        try:
            yield
        finally:
            pause = self._clock() - begin
            self._started = started + pause
            self.paused_seconds += pause
