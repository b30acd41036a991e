"""Which checkpoints of a run stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Rules of what stays after a checkpoint was saved.

    Attributes:
        last: Number of latest checkpoints that stay, 1 or more.
        every: Steps. Of each so many steps, counted from the `every`th, the first checkpoint stays
            for good; 0: none does.
        max_bytes: The oldest go while all of them are larger together; never the latest, and none
            that stays for good. None: no limit.
    """

    last: int = 2
    every: int = 0
    max_bytes: int | None = None

    def surplus(self, sizes: Mapping[int, int]) -> list[int]:
        """Return the steps whose checkpoints go, the oldest first.

        Args:
            sizes: Bytes of each checkpoint by step.
        """
        steps = sorted(sizes)
        latest, for_good = set(steps[-self.last :]), self._for_good(steps)
        going = [step for step in steps if step not in latest | for_good]
        if self.max_bytes is None:
            return going
        staying = [step for step in steps if step not in going]
        excess = sum(sizes[step] for step in staying) - self.max_bytes
        for step in staying[:-1]:
            if excess > 0 and step not in for_good:
                going.append(step)
                excess -= sizes[step]
        return going

    def _for_good(self, steps: list[int]) -> set[int]:
        if self.every == 0:
            return set()
        # In reverse, so that the first of each window overwrites the others.
        first = {step // self.every: step for step in reversed(steps)}
        return {step for window, step in first.items() if window > 0}
