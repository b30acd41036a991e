"""Stops a run early enough for its job to end within `max_minutes`."""

from __future__ import annotations

from distmp.training.callbacks.callback import Callback, PendingStep, TrainingLoop
from distmp.training.run import Run
from distmp.training.time_budget import TimeBudget, job_started


class TimeLimit(Callback):
    """Measures steps and saves, and asks to stop while there is time for the last save.

    Args:
        run: The run.

    Attributes:
        budget: Estimates the remaining time.
    """

    def __init__(self, run: Run) -> None:
        minutes = run.config.max_minutes
        state = {} if minutes is None else run.engine.state_dict()
        saved_bytes = sum(tensor.nbytes for tensor in state.values())
        self.budget = TimeBudget(minutes, saved_bytes, job_started())

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Record how long the step took."""
        self.budget.add_step(step.seconds)

    def on_save(self, trainer: TrainingLoop, step: int, seconds: float) -> None:
        """Record how long the save took."""
        self.budget.add_save(seconds)

    def stop_reason(self, trainer: TrainingLoop) -> str | None:
        """Stop if the remaining time only suffices to save and exit."""
        limit = trainer.config.max_minutes
        return f"max_minutes = {limit:g}" if limit is not None and self.budget.is_spent() else None
