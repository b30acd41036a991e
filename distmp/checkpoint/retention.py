"""Selects the checkpoints of a run to keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Rules that select the checkpoints to remove after each save.

    The rules keep healthy checkpoints. Of the unhealthy ones only the latest is kept, until a
    healthy one follows. One that was saved after a skipped step counts as unhealthy here, until a
    later one shows that its weights were updated.

    Attributes:
        last: Number of latest checkpoints to keep, 1 or more.
        every: Length of a window in steps, counted from step `every`. The first checkpoint of each
            window is kept permanently; 0 keeps none.
        max_bytes: Total size in bytes above which checkpoints are removed: first an unhealthy one,
            then the oldest; never the latest healthy one, and none that is kept permanently. None:
            no limit.
        best: Step of a checkpoint that is kept in addition; None for none.
    """

    last: int = 2
    every: int = 0
    max_bytes: int | None = None
    best: int | None = None

    def surplus(self, sizes: Mapping[int, int], unhealthy: Collection[int] = ()) -> list[int]:
        """Return the steps of the checkpoints to remove, in this order.

        Args:
            sizes: Size of each checkpoint in bytes, by step.
            unhealthy: Steps of the unhealthy checkpoints.
        """
        steps = sorted(sizes)
        healthy = [step for step in steps if step not in unhealthy]
        permanent = self._permanent(healthy) | {step for step in steps if step == self.best}
        wanted = {*steps[-1:], *healthy[-self.last :], *permanent}
        removed = [step for step in steps if step not in wanted]
        if self.max_bytes is None:
            return removed
        kept = sorted(wanted, key=lambda step: (step in healthy, step))
        excess = sum(sizes[step] for step in kept) - self.max_bytes
        for step in kept[:-1]:
            if excess > 0 and step not in permanent:
                removed.append(step)
                excess -= sizes[step]
        return removed

    def _permanent(self, steps: list[int]) -> set[int]:
        if self.every == 0:
            return set()
        # In reverse, so that the first of each window overwrites the others.
        first = {step // self.every: step for step in reversed(steps)}
        return {step for window, step in first.items() if window > 0}
