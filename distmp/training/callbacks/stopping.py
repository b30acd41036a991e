"""Ends a run: early enough for the time limit of its job, or if a metric no longer improves."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import psutil

from distmp.checkpoint.snapshot import written_here
from distmp.checkpoint.storage import final_path, is_checkpoint
from distmp.config import RunConfig
from distmp.distributed.failing_together import Ranks
from distmp.distributed.rank_environment import RankEnvironment, is_under_torchrun
from distmp.training.callbacks.callback import Callback, PendingStep, Rollback, TrainingLoop
from distmp.training.callbacks.checkpointing import Checkpointing
from distmp.utils.dtypes import local_values

logger = logging.getLogger("distmp")

# The next steps are expected to take as long as the slowest of this many recent ones.
_STEPS_REMEMBERED = 50
# On a GPU, a request to stop is read two steps after it was launched.
_STEPS_TO_STOP = 3
# On shared storage a save may take longer than earlier ones: factor on the longest one.
_SAVES = 1.5
# Estimate until a save has been measured: a constant, and the state at the speed of a disk.
_FIRST_SAVE_SECONDS = 2.0
_FIRST_SAVE_BYTES_PER_SECOND = 100e6
# For the last messages, and the exit of the interpreter.
_END_SECONDS = 5.0


def job_started() -> float:
    """Return when this job started, in seconds since the epoch.

    Under torchrun and `distmp launch` this is the start of the launcher, which is the same after a
    restart of the ranks; otherwise it is the start of this process.
    """
    # torchrun's agent is the parent of each rank.
    parent = psutil.Process().parent() if is_under_torchrun() else None
    return (parent or psutil.Process()).create_time()


class TimeLimit(Callback):
    """Requests a stop while there is time to save the last checkpoint and exit.

    The remaining time has to cover three steps as slow as the slowest of the last 50, one and
    a half times the longest save, and five seconds.

    Args:
        minutes: Minutes from the start of the job.
    """

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        # Until a save has been measured.
        self._first_save = _FIRST_SAVE_SECONDS
        self._longest_save: float | None = None
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._job_started = job_started()

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Record how long the step took, and estimate how long its save would take."""
        if not self._steps:  # the optimizer has its state now
            state, world = trainer.engine.state_dict(), trainer.world
            written = written_here(state, world.rank, world.world_size)
            saved_bytes = sum(local_values(tensor).nbytes for tensor in written.values())
            # All ranks of this machine write to one disk.
            saved_bytes *= RankEnvironment.from_variables().local_world_size
            self._first_save += saved_bytes / _FIRST_SAVE_BYTES_PER_SECOND
        self._steps.append(step.seconds)

    def on_save(self, trainer: TrainingLoop, step: int, seconds: float) -> None:
        """Record how long the save took, until it was complete."""
        self._longest_save = max(self._longest_save or 0.0, seconds)

    def stop_reason(self, trainer: TrainingLoop) -> str | None:
        """Stop if the remaining time only suffices to save and exit. Ranks may disagree."""
        left = self._job_started + 60 * self._minutes - time.time()
        slowest = max(self._steps, default=0.0)
        save = self._first_save if self._longest_save is None else self._longest_save
        needed = _STEPS_TO_STOP * slowest + _SAVES * save + _END_SECONDS
        return f"max_minutes = {self._minutes:g}" if left <= needed else None


# Attributes of `EarlyStopping` that a checkpoint stores.
_STATE = ("settings", "best", "best_step", "last_step", "without_improvement")


class EarlyStopping(Callback):
    """Compares each validation with the best one so far.

    The validation after the last step counts only if it evaluates as many samples as the others.

    Args:
        config: The configuration of the run, with a patience above 0.
        checkpointing: Keeps the best checkpoint.
        held_out: Number of held-out samples; None if that of a stream is unknown.
    """

    def __init__(
        self, config: RunConfig, checkpointing: Checkpointing, held_out: int | None
    ) -> None:
        self._checkpointing = checkpointing
        self._config = config.early_stopping
        most = math.inf if held_out is None else held_out
        self._samples = samples = min(config.validation.samples, most)
        self._final_counts = samples == min(config.validation.final_samples or most, most)
        # Values of another metric, direction or held-out data cannot be compared.
        self._settings = {
            "early_stopping.metric": self._config.metric,
            "early_stopping.mode": "max" if self._config.maximizes else "min",
            "validation.samples": samples,
            "data.validation_path": config.data.validation_path,
        }
        self._restart()

    def _restart(self) -> None:
        self._best: float | None = None
        self._best_step = 0
        self._last_step = 0
        self._without_improvement = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and the number of validations since then."""
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting where the checkpoint was saved, and keep its best checkpoint."""
        before = state.get("settings", {})
        changed = [
            f"{name} {before.get(name)} -> {value}"
            for name, value in self._settings.items()
            if before.get(name) != value
        ]
        if not changed:
            for name in _STATE:
                setattr(self, f"_{name}", state[name])
        elif state.get("best") is not None and Ranks(None).rank == 0:
            logger.warning(
                "early stopping: %s; the best value so far, and its checkpoint, are no longer kept",
                ", ".join(changed),
            )
        # Also after a rollback, which saves next and would remove the best checkpoint.
        self._checkpointing.keep(self._best_step)

    def on_rollback(self, trainer: TrainingLoop, rollback: Rollback) -> None:
        """Count from the start if the checkpoint has no values of this metric."""
        if self._last_step > rollback.to_step:
            self._restart()
            self._checkpointing.keep(0)

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
        if trainer.world.rank == 0 and not is_checkpoint(path):
            where = f"no checkpoint in {directory}: an earlier run has it, or no save succeeded"
        trainer.console.message(
            f"best held-out {self._config.metric} {self._best:.4g} on {self._samples} samples, "
            f"at step {self._best_step}: {where}"
        )

    def _improves(self, value: float) -> bool:
        """Return whether a value is better than the best one; NaN never is."""
        if self._best is None:
            return value == value
        gain = value - self._best if self._config.maximizes else self._best - value
        return gain > self._config.min_delta

    def _finish_if_out_of_patience(self, trainer: TrainingLoop) -> None:
        if self._without_improvement >= self._config.patience:
            best = f"has not improved on {self._best or 0:.4g} at step {self._best_step}"
            trainer.finish_early(
                f"{self._config.metric} {'was NaN' if self._best is None else best} for "
                f"{self._without_improvement} validations (early_stopping.patience)"
            )
