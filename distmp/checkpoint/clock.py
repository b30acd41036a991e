"""Saving by time: all ranks find in the same step that so many minutes have passed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from distmp.distributed.world import World


class SaveClock:
    """Measures the time since the last save began, by the clock of rank 0.

    Ranks do not ask each other in every step. Rank 0 looks at its clock, estimates from the pace of
    the steps when half of the remaining time will have passed, and tells the others at which step
    to ask again: fewer than twenty broadcasts of one number between two saves.

    Args:
        minutes: Between saves; 0 never asks.
        world: The ranks.
        now: Seconds on a clock that only goes forward.
    """

    def __init__(
        self, minutes: float, world: World, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = 60 * minutes
        self._world = world
        self._now = now
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin to measure anew after `step`, the same on all ranks."""
        self._started, self._first_step = self._now(), step
        self._look_at = step + 1

    def is_due(self, step: int, *, busy: bool) -> bool:
        """Return whether to save after `step`, alike on all ranks, which call it for every step.

        Args:
            step: Steps done.
            busy: Whether the last save is still being written; rank 0's word decides. The next one
                then waits until it has ended, instead of training.
        """
        if not self._seconds or step < self._look_at:
            return False
        steps = torch.tensor(self._steps_to_wait(step, busy=busy), device=self._world.device)
        if self._world.group is not None:
            dist.broadcast(steps, src=0, group=self._world.group)
        self._look_at = step + int(steps)
        return self._look_at == step

    def _steps_to_wait(self, step: int, *, busy: bool) -> int:
        """Return after how many steps to look again; 0: it is time."""
        done = max(step - self._first_step, 1)
        elapsed = self._now() - self._started
        if elapsed >= self._seconds:
            return 1 if busy else 0
        half = (self._seconds - elapsed) / 2
        # No more than have been done: the pace of the first steps says little.
        return max(1, min(done, int(half * done / max(elapsed, 1e-9))))
