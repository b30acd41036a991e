"""Records the steps of the section `profile`."""

from __future__ import annotations

from distmp.telemetry.profiler import StepProfiler
from distmp.training.callbacks.callback import Callback, StepResult, TrainingLoop
from distmp.training.callbacks.checkpointing import exit_context
from distmp.training.run import Run


class Profiling(Callback):
    """Starts and stops a `StepProfiler`.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._profiler = StepProfiler(
            run.config.profile, run.directory.profile, run.world, run.console.message
        )

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        """Start before the first step to record, stop before the step after the last one."""
        with trainer.timer.paused():
            self._profiler.before(step)

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Stop before a rollback, which is not part of a step."""
        if result.rolls_back:
            self._profiler.finish()

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Stop, and report if no step was recorded."""
        exit_context(self._profiler, None)

    def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
        """After an error, write what was recorded."""
        if error is not None:
            exit_context(self._profiler, error)
