"""Saving by time: all ranks decide in the same step that it is time to save."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from distmp.distributed.world import World


class SaveClock:
    """Measures the time since the last save began, by the clock of rank 0.

    The ranks do not communicate in every step. Rank 0 estimates from the duration of the steps when
    half of the remaining time will have passed, and broadcasts the step of the next check: fewer
    than twenty broadcasts of one number between two saves.

    Args:
        minutes: Minutes between saves; 0 disables saving by time.
        world: The ranks.
        now: Returns seconds of a monotonic clock.
    """

    def __init__(
        self, minutes: float, world: World, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = 60 * minutes
        self._world = world
        self._now = now
        self.restart(0)

    def restart(self, step: int) -> None:
        """Restart the measurement after `step`, the same on all ranks."""
        self._started, self._first_step = self._now(), step
        self._next_check = step + 1

    def is_due(self, step: int, *, busy: bool) -> bool:
        """Return whether to save after `step`. Collective: all ranks call it for every step.

        Args:
            step: Number of steps done.
            busy: Whether the last save is still being written; the value of rank 0 counts. The next
                save is then postponed until that has ended, so that training does not wait for it.
        """
        if not self._seconds or step < self._next_check:
            return False
        steps = torch.tensor(self._steps_to_wait(step, busy=busy), device=self._world.device)
        if self._world.group is not None:
            dist.broadcast(steps, src=0, group=self._world.group)
        self._next_check = step + int(steps)
        return self._next_check == step

    def _steps_to_wait(self, step: int, *, busy: bool) -> int:
        """Return the number of steps until the next check; 0 if it is time to save."""
        done = max(step - self._first_step, 1)
        elapsed = self._now() - self._started
        if elapsed >= self._seconds:
            return 1 if busy else 0
        half = (self._seconds - elapsed) / 2
        # At most as many as have been done: the first steps are a poor estimate.
        return max(1, min(done, int(half * done / max(elapsed, 1e-9))))
