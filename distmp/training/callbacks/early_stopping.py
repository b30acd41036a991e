"""Ends a run whose metric on held-out data no longer improves, and keeps its best checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distmp.checkpoint.storage import final_path, is_checkpoint
from distmp.config import RunConfig
from distmp.training.callbacks.callback import Callback, TrainingLoop
from distmp.training.callbacks.checkpointing import Checkpointing


class EarlyStopping(Callback):
    """Compares each validation with the best one so far.

    The validation after the last step counts only if it evaluates as many samples as the others.

    Args:
        config: The configuration of the run, with a patience above 0.
        checkpointing: Keeps the best checkpoint.
    """

    def __init__(self, config: RunConfig, checkpointing: Checkpointing) -> None:
        self._checkpointing = checkpointing
        self._config = config.early_stopping
        self._maximizes = self._config.maximizes
        self._final_counts = config.validation.final_samples == config.validation.samples
        self._best: float | None = None
        self._best_step = 0
        self._last_step = 0
        self._without_improvement = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and the number of validations since then."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "last_step": self._last_step,
            "without_improvement": self._without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting where the checkpoint was saved, and keep its best checkpoint."""
        self._best = state["best"]
        self._best_step = state["best_step"]
        self._last_step = state["last_step"]
        self._without_improvement = state["without_improvement"]
        # Also after a rollback, which saves next and would remove the best checkpoint.
        self._checkpointing.keep(self._best_step)

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        """Stop again if the run had stopped early."""
        self._finish_if_out_of_patience(trainer)

    def on_validation(
        self, trainer: TrainingLoop, loss: float, metrics: Mapping[str, float]
    ) -> None:
        """Save the checkpoint after this step if it is the best, or end the run."""
        step = trainer.progress.step
        counts = self._final_counts or step < trainer.config.steps
        if not counts or step == self._last_step:
            return
        self._last_step = step
        value = loss if self._config.metric == "loss" else metrics[self._config.metric]
        if self._improves(value):
            self._best, self._best_step, self._without_improvement = value, step, 0
            self._checkpointing.keep(step, save=True)
            return
        self._without_improvement += 1
        self._finish_if_out_of_patience(trainer)

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Print the best value and where its checkpoint is."""
        if self._best is None:
            return
        self._checkpointing.writer.finish()
        directory = trainer.directory.checkpoints
        path = final_path(directory, self._best_step)
        where = str(path)
        # The last step is saved after this.
        is_last = self._best_step == trainer.progress.step
        if trainer.world.rank == 0 and not (is_last or is_checkpoint(path)):
            where = f"no checkpoint in {directory}, but in the run that this one continues"
        trainer.console.message(
            f"best held-out {self._config.metric} {self._best:.4g} at step {self._best_step}: "
            f"{where}"
        )

    def _improves(self, value: float) -> bool:
        """Return whether a value is better than the best one; NaN never is."""
        if self._best is None:
            return value == value
        gain = value - self._best if self._maximizes else self._best - value
        return gain > self._config.min_delta

    def _finish_if_out_of_patience(self, trainer: TrainingLoop) -> None:
        if self._without_improvement >= self._config.patience:
            best = f"has not improved on {self._best or 0:.4g} at step {self._best_step}"
            trainer.finish_early(
                f"{self._config.metric} {'was NaN' if self._best is None else best} for "
                f"{self._without_improvement} validations (early_stopping.patience)"
            )
