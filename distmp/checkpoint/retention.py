"""Selects the checkpoints of a run to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Rules that select the checkpoints to remove after each save.

    Attributes:
        last: Number of latest checkpoints to keep, 1 or more.
        every: Length of a window in steps, counted from step `every`. The first checkpoint of each
            window is kept permanently; 0 keeps none.
        max_bytes: Total size in bytes above which the oldest checkpoints are removed; never the
            latest, and none that is kept permanently. None: no limit.
    """

    last: int = 2
    every: int = 0
    max_bytes: int | None = None

    def surplus(self, sizes: Mapping[int, int]) -> list[int]:
        """Return the steps of the checkpoints to remove, the oldest first.

        Args:
            sizes: Size of each checkpoint in bytes, by step.
        """
        steps = sorted(sizes)
        latest, permanent = set(steps[-self.last :]), self._permanent(steps)
        removed = [step for step in steps if step not in latest | permanent]
        if self.max_bytes is None:
            return removed
        kept = [step for step in steps if step not in removed]
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
