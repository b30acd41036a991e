"""Checks during a run: untrained adapters, ranks that differ, and the lease."""

from __future__ import annotations

from distmp.distributed.progress import COMPARISON, current_phase
from distmp.engine import rank_consistency
from distmp.engine.state import UNUSED
from distmp.errors import listed
from distmp.models.adapters import is_adapter
from distmp.training.callbacks.callback import Callback, PendingStep, StepResult, TrainingLoop
from distmp.training.callbacks.validation import Ema
from distmp.training.run_lease import LostLeaseError


class AdapterCheck(Callback):
    """Prints the adapters without a gradient: a model may use a weight without its layer."""

    _is_done = False

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Look for them in the first step that is applied."""
        if self._is_done or result.numbers.skipped or trainer.config.model.peft is None:
            return
        self._is_done = True
        names = [name for name in trainer.engine.state_dict() if name.startswith(UNUSED)]
        unused = [name.removeprefix(UNUSED) for name in names if is_adapter(name)]
        if unused:
            trainer.console.message(
                f"model.peft: {len(unused)} parameters of adapters have had no gradient, "
                f"{listed(unused)}; if the model reads the weight of a layer instead of calling "
                "it, leave the layer out of target_modules"
            )


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


class LeaseCheck(Callback):
    """Checks on rank 0, before anything is written, that the run directory is this job's."""

    def _check(self, trainer: TrainingLoop, *_: object, **__: object) -> None:
        if trainer.lease is None:
            return
        try:
            trainer.lease.check()
        except LostLeaseError as error:
            if not error.is_same_job:
                trainer.restarts.give_up(error.exit_code)
            raise

    # Before the step, before its record, and before the last files.
    on_step_begin = on_step_end = on_train_end = _check
