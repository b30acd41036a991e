"""Settings of section `checkpoint`, and the rules that select checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distmp.utils.annotations import Section


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
        best: Step of the best checkpoint so far, which `state.json` of the new one names; None for
            none. It is kept for as long as one of the latest checkpoints names it: a rollback to
            that one needs it again. If its save failed, the best one before it is kept.
        continued_from: Step from which this run continued; inf if it did not. A checkpoint of a
            later step that a new one replaces is set aside.
    """

    last: int = 2
    every: int = 0
    best: int | None = None
    continued_from: float = math.inf

    def surplus(
        self, steps: Collection[int], unhealthy: Collection[int], best: Mapping[int, int]
    ) -> list[int]:
        """Return the steps of the checkpoints to remove, in this order.

        Args:
            steps: Steps of the checkpoints.
            unhealthy: Steps of the unhealthy checkpoints.
            best: Step of the best checkpoint that a checkpoint names, by step.
        """
        ordered = sorted(steps)
        healthy = [step for step in ordered if step not in unhealthy]
        latest = {*ordered[-1:], *healthy[-self.last :]}
        bests = {*steps} & {*best.values()}
        named = {max((b for b in bests if b <= best[s]), default=s) for s in latest & best.keys()}
        wanted = latest | named | self.permanent(healthy)
        return [step for step in ordered if step not in wanted]

    def permanent(self, steps: Collection[int]) -> set[int]:
        """Return the first step of each window."""
        every = self.every or math.inf
        # In reverse, so that the first of each window overwrites the others.
        first = {step // every: step for step in sorted(steps, reverse=True)}
        return {step for window, step in first.items() if window > 0}


@dataclass(frozen=True)
class CheckpointConfig(Section, section="checkpoint"):
    """When checkpoints are written, and how many are kept."""

    every: int = 0
    """Steps between checkpoints; 0 writes one only at the end."""

    asynchronous: bool = True
    """Continue training while a checkpoint is written; takes host memory for a copy of the state
    that the rank writes."""

    keep: int = 2
    """Number of latest checkpoints to keep."""

    keep_every: int = 0
    """Permanently keep the first checkpoint of each interval of so many steps; 0 disables this."""

    path: str | None = None
    """Parent directory of the checkpoint directory, which has the name of the run's directory.
    null: in the run's directory."""

    def _check(self) -> None:
        problem = "give a number of steps, or 0"
        self._require(self.every >= 0, "every", problem)
        self._require(self.keep >= 1, "keep", "keep at least 1 checkpoint")
        self._require(self.keep_every >= 0, "keep_every", problem)
        problem = "has no effect without checkpoint.every, the steps between checkpoints; set it"
        self._require(self.every > 0 or self.keep_every == 0, "keep_every", problem)
        self._require(self.path != "", "path", "give a path, or null")
