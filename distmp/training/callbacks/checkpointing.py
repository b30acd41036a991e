"""Saves the state of a run at intervals and at the end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.progress import SAVING, current_phase
from distmp.training.callbacks.callback import Callback, PendingStep
from distmp.training.callbacks.exits import exit_context

if TYPE_CHECKING:
    from distmp.training.build import Run
    from distmp.training.trainer import Trainer


class Checkpointing(Callback):
    """Writes the checkpoints of a run.

    A rollback uses it too: `writer` waits for a save, and `save_now` saves the new data position.

    Args:
        run: The run, in its state before the first step.

    Attributes:
        writer: Writes checkpoints in the background.
    """

    def __init__(self, run: Run) -> None:
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
        self._trainer: Trainer | None = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Start the writer; save once where a rollback may need a checkpoint."""
        self._trainer = trainer
        self.writer.__enter__()
        if trainer.config.divergence.rolls_back and self.writer.saved_step is None:
            self._save(trainer)

    def on_step_launched(self, trainer: Trainer, step: PendingStep) -> None:
        """Save if it is due; the last step is saved at the end."""
        if step.step == trainer.config.steps or not self.writer.is_due(step.step):
            return
        # The step is read first: a skipped step can be replayed only before the weights change, and
        # a step that causes a rollback is not saved.
        trainer.read_step()
        if trainer.rollback_from is None:
            self._save(trainer)

    def stop_reason(self, trainer: Trainer) -> str | None:
        """Stop if a save failed and `checkpoint.on_failure` is "stop"."""
        return "a checkpoint could not be written" if self.writer.wants_stop else None

    def on_train_end(self, trainer: Trainer, *, finished: bool) -> None:
        """Save the last step."""
        self.save_now(trainer)

    def on_exit(self, trainer: Trainer, error: BaseException | None) -> None:
        """Wait for a save in the background; raise if the last one failed."""
        exit_context(self.writer, error)
        if error is None:
            self.writer.check()

    def save_now(self, trainer: Trainer) -> None:
        """Save the current state, unless it is saved, and wait until it is written."""
        current_phase.enter(SAVING, transfers=True)
        self.writer.save_now(trainer.progress.step, trainer.engine.state_dict(), _numbers(trainer))

    def _save(self, trainer: Trainer) -> None:
        current_phase.enter(SAVING, transfers=True)
        with trainer.timer.paused():
            self.writer.save(
                trainer.progress.step,
                trainer.engine.state_dict(),
                _numbers(trainer),
                trainer.engine.updated_by_optimizer(),
            )

    def _note_save(self, seconds: float) -> None:
        if self._trainer is not None and self.writer.saved_step is not None:
            self._trainer.report_save(self.writer.saved_step, seconds)


def _numbers(trainer: Trainer) -> dict[str, Any]:
    return {**dataclasses.asdict(trainer.progress), **trainer.fingerprint}
