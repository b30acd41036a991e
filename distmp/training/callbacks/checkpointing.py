"""Saves the state of a run at intervals and at the end."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distmp.checkpoint import store
from distmp.checkpoint.manifest import Health
from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.progress import SAVING, current_phase
from distmp.distributed.ranks import describe
from distmp.engine.outcome import WARN_AFTER_SKIPS
from distmp.engine.saving import StateToSave, described_optimizer, skipped_in_a_row
from distmp.errors import TrainingError
from distmp.training.callbacks.callback import Callback, PendingStep, TrainingLoop
from distmp.training.run import Run

if TYPE_CHECKING:
    from distmp.training.callback_state import CallbackStates


def exit_context(manager: AbstractContextManager[Any], error: BaseException | None) -> None:
    """Exit a context manager as a `with` block that ends with `error`, or without an error."""
    traceback = None if error is None else error.__traceback__
    manager.__exit__(None if error is None else type(error), error, traceback)


logger = logging.getLogger("distmp")


class Checkpointing(Callback):
    """Writes the checkpoints of a run.

    A rollback uses it too: `writer` waits for a save, and `save_now` saves the new data position.

    Args:
        run: The run, in its state before the first step.
        states: The states of all callbacks.

    Attributes:
        writer: Writes checkpoints in the background.
    """

    def __init__(self, run: Run, states: CallbackStates) -> None:
        self._states = states
        self._fingerprint = run.fingerprint
        self.writer = CheckpointWriter(
            run.config.checkpoint,
            run.directory.checkpoints,
            run.world,
            timeout_seconds=60 * run.config.timeout_minutes,
            log=run.console.message,
            on_saved=self._note_save,
            permit=lambda: None if run.lease is None else run.lease.check(),
        )
        self.writer.guard(run.engine.optimizer)
        if run.checkpoint is not None:
            saved = run.directory.owns(run.checkpoint.path)
            self.writer.resumed(run.progress.step, saved=saved)
        self._trainer: TrainingLoop | None = None
        # The step after which this process started.
        self._first_step = run.progress.step
        self._is_prepared = False
        # The step after which `keep` has requested a save.
        self._requested: int | None = None

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        """Start the writer; save once where a rollback may need a checkpoint."""
        self._trainer = trainer
        self.writer.__enter__()
        if trainer.config.divergence.rolls_back and self.writer.saved_step is None:
            self._save(trainer)

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Save if it is due; the last step is saved at the end."""
        if not self._is_prepared and _saves_later(trainer, step.step):
            self.writer.prepare(trainer.engine.state_dict() | self._states.tensors())
        self._is_prepared = True
        due = self.writer.is_due(step.step) or self._requested == step.step
        if step.step == trainer.config.steps or not due:
            return
        # The step is read first: a skipped step can be replayed only before the weights change, and
        # a step that causes a rollback is not saved.
        trainer.read_step()
        if trainer.rollback_from is None:
            self._save(trainer)

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Save the last step, and warn if it was skipped.

        Raises:
            TrainingError: If the run is finished, but its weights are unhealthy, or it resumed
                after skipped steps and applied no update.
        """
        counts, step = trainer.engine.step_counts, trainer.progress.step
        message = _skips_message(step, *counts.tolist())
        skipped, own = skipped_in_a_row(counts), step - self._first_step
        if finished and (skipped >= WARN_AFTER_SKIPS or 0 < own < skipped):
            raise TrainingError(f"{message}; {self.give_up(trainer, message)}")
        self.save_now(trainer)
        if message and trainer.world.rank == 0:
            before = (
                f", and continue from a checkpoint before step {step - skipped} with --resume PATH"
            )
            logger.warning("%s%s", message, before if skipped else "")

    def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
        """Wait for a save in the background; raise if the last one failed."""
        exit_context(self.writer, error)
        if error is None:
            self.writer.check()

    def save_now(self, trainer: TrainingLoop) -> None:
        """Save the current state, unless it is saved, and wait until it is written."""
        current_phase.enter(SAVING, transfers=True)
        self.writer.save(*self._state(trainer), wait=True)

    def keep(self, step: int, *, save: bool = False) -> None:
        """Keep the checkpoint of a step until another one is named. Call it on every rank.

        Args:
            step: The step; 0 for none.
            save: Whether to save after this step, if no save is due then.
        """
        self.writer.best_step = step or None
        if save:
            self._requested = step

    def give_up(self, trainer: TrainingLoop, problem: str) -> str:
        """Return which checkpoint a run that cannot continue goes back to. Collective.

        If steps were skipped since the last update, this saves the weights as unhealthy.
        Checkpoints since then are unhealthy too: they have the same weights.

        Args:
            trainer: The trainer.
            problem: Why the run cannot continue.
        """
        self.writer.finish()
        if skipped_in_a_row(trainer.engine.step_counts):
            current_phase.enter(SAVING, transfers=True)
            step, tensors, numbers, held, health = self._state(trainer)
            marked = health._replace(problem=health.problem or problem.partition(";")[0])
            self.writer.save(step, tensors, numbers, held, marked, wait=True)
        directory = trainer.directory.checkpoints
        return trainer.world.ranks.from_rank_0(lambda: _last_healthy(directory))

    def _save(self, trainer: TrainingLoop) -> None:
        current_phase.enter(SAVING, transfers=True)
        with trainer.timer.paused():
            self.writer.save(*self._state(trainer))

    def _state(
        self, trainer: TrainingLoop
    ) -> tuple[int, dict[str, Tensor], dict[str, Any], set[str], Health]:
        """Return the arguments of `CheckpointWriter.save`."""
        step, tensors, held, health = StateToSave.of(trainer.engine)
        tensors |= self._states.tensors()
        numbers = {
            **dataclasses.asdict(trainer.progress),
            **described_optimizer(trainer.engine),
            **self._fingerprint,
            **self._states.numbers(),
        }
        return step, tensors, numbers, held, health

    def _note_save(self, seconds: float) -> None:
        if self._trainer is not None and self.writer.saved_step is not None:
            self._trainer.report_save(self.writer.saved_step, seconds)


def _saves_later(trainer: TrainingLoop, step: int) -> bool:
    """Return whether a save may be due after `step` and before the end."""
    settings = trainer.config.checkpoint
    every = settings.every
    return every > 0 and (step // every + 1) * every < trainer.config.steps


def _last_healthy(directory: Path) -> str:
    try:
        healthy = store.newest_healthy(directory)
    except OSError as error:
        return f"{directory} cannot be searched for a healthy checkpoint: {describe(error)}"
    if healthy is None:
        return f"there is no healthy checkpoint in {directory}, so start again without --resume"
    return f"the last healthy checkpoint is {healthy}, from which --resume auto continues"


def _skips_message(step: int, applied: int, skipped_total: int, skipped: int) -> str:
    """Return a warning about the steps skipped since the last update; "" without any."""
    if not skipped:
        return ""
    if not applied:
        return (
            f"all {skipped_total} steps were skipped, so the weights after step {step} are the "
            "initial ones; the message of each skipped step says why"
        )
    steps = "step was" if skipped == 1 else f"{skipped} steps were all"
    return (
        f"the last {steps} skipped, so the weights after step {step} are those of step "
        f"{step - skipped}; under FP16 one such step is usual, otherwise lower optim.lr or "
        "optim.max_norm, or inspect the data"
    )
