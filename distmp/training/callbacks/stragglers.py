"""Compares the speed of ranks, every `log.ranks_every` steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp.telemetry.stragglers import Stragglers
from distmp.training.callbacks.callback import Callback, PendingStep, StepResult, TrainingLoop

if TYPE_CHECKING:
    from distmp.training.run import Run


class StragglerDetection(Callback):
    """Reports ranks that keep the others waiting.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._stragglers = Stragglers(
            run.world,
            run.engine.clock,
            run.engine.strategy,
            every=run.config.log.ranks_every,
            log=run.console.message,
        )
        self._paused_seconds = 0.0

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        """Start measuring this rank, if a comparison is due soon."""
        # The pauses since the previous step. `Profiling`, called before, may have paused the timer.
        self._paused_seconds = trainer.timer.paused_seconds
        self._stragglers.before(step)

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Start the exchange between ranks, if it is due. No rank waits for it."""
        self._stragglers.after(step.step, self._paused_seconds)

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Read the times that ranks exchanged after this step."""
        result.rank_seconds = self._stragglers.seconds(result.step)
