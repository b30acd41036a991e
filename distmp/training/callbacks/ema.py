"""Averages the weights, as configured in the section `ema`."""

from __future__ import annotations

from typing import Any

from distmp.engine.average import WeightAverage
from distmp.engine.settings import EmaConfig
from distmp.training.callbacks.callback import Callback, PendingStep, Rollback, TrainingLoop


class Ema(Callback):
    """Updates the average after each step; checkpoints contain it as `callbacks/Ema/PARAMETER`.

    Args:
        config: The settings, with a decay above 0.

    Attributes:
        average: The average, from `setup` on.
    """

    average: WeightAverage

    def __init__(self, config: EmaConfig) -> None:
        self._config = config

    def setup(self, trainer: TrainingLoop) -> None:
        """Start with the current weights; a checkpoint with an average replaces them."""
        self.average = WeightAverage(trainer.engine, self._config)

    def state_dict(self) -> dict[str, Any]:
        """Return the average by parameter name."""
        return {**self.average.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored average; shards have been loaded in place."""
        self.average.load(state)

    def on_rollback(self, trainer: TrainingLoop, rollback: Rollback) -> None:
        """Begin with the weights of the checkpoint if it has no average."""
        if self.average.is_replaced:
            self.average.restart()

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Include the weights of this step, unless it was skipped; the host does not wait."""
        self.average.update()
