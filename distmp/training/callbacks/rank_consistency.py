"""Compares the bits of replicated state between ranks, every `rank_consistency.every` steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp.distributed.progress import COMPARISON, current_phase
from distmp.engine import rank_consistency
from distmp.training.callbacks.callback import Callback, PendingStep, TrainingLoop

if TYPE_CHECKING:
    from distmp.training.callbacks.ema import Ema


class RankConsistency(Callback):
    """Stops a run whose ranks differ.

    Args:
        ema: Averages the weights; None if the run has no average.
    """

    def __init__(self, ema: Ema | None) -> None:
        self._ema = ema

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Compare weights, average, optimizer state and loss scale of all ranks, if it is due."""
        settings = trainer.config.rank_consistency
        if settings.every and step.step % settings.every == 0:
            current_phase.enter(COMPARISON)
            with trainer.timer.paused():
                average = None if self._ema is None else self._ema.average.values
                rank_consistency.check(trainer.engine, average)
