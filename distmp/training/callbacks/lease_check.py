"""Ends a run whose directory another job has taken over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp.training.callbacks.callback import Callback, StepResult, TrainingLoop
from distmp.training.run_lease import LostLeaseError

if TYPE_CHECKING:
    from distmp.training.run import Run


class LeaseCheck(Callback):
    """Checks on rank 0, before anything is written, that the run directory is this job's.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._lease = run.lease
        self._restarts = run.restarts

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        """Check before the step."""
        self._check()

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Check before the record of the step."""
        self._check()

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Check before the last files."""
        self._check()

    def _check(self) -> None:
        if self._lease is None:
            return
        try:
            self._lease.check()
        except LostLeaseError as error:
            if not error.is_same_job:
                self._restarts.give_up(error.exit_code)
            raise
