"""Compares the bits of replicated state between ranks, every `rank_consistency.every` steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp.distributed.progress import COMPARISON, current_phase
from distmp.engine import rank_consistency
from distmp.training.callbacks.callback import Callback, PendingStep

if TYPE_CHECKING:
    from distmp.training.trainer import Trainer


class RankConsistency(Callback):
    """Stops or repairs a run whose ranks differ."""

    def on_step_launched(self, trainer: Trainer, step: PendingStep) -> None:
        """Compare weights, optimizer state and loss scale of all ranks, if it is due."""
        settings = trainer.config.rank_consistency
        if settings.every and step.step % settings.every == 0:
            current_phase.enter(COMPARISON)
            with trainer.timer.paused():
                rank_consistency.check(trainer.engine, settings.on_difference)
