"""Evaluates the model on held-out data, every `validation.every` steps and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp.data.loading import evaluation_batches
from distmp.distributed.stopping import until_stop_requested
from distmp.training.callbacks.callback import Callback, PendingStep
from distmp.training.weight_unit import loss_unit

if TYPE_CHECKING:
    from distmp.training.trainer import Trainer


class Validation(Callback):
    """Computes the mean loss on held-out data; the record of the step contains it."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """Repeat the last validation of a run that has no steps left: it may have been stopped."""
        if trainer.progress.step == trainer.config.steps:
            self._validate(trainer, last=True)

    def on_step_launched(self, trainer: Trainer, step: PendingStep) -> None:
        """Validate if it is due."""
        every, last = trainer.config.validation.every, step.step == trainer.config.steps
        if last or (every > 0 and step.step % every == 0):
            self._validate(trainer, last=last)

    def _validate(self, trainer: Trainer, *, last: bool) -> None:
        settings = trainer.config.validation
        with trainer.timer.paused():
            loss = _mean_loss(trainer, settings.final_samples if last else settings.samples)
        if loss is None:
            return
        if last:
            trainer.console.message(f"held-out loss {loss:.4f}{loss_unit(trainer.config)}")
        trainer.report_validation(loss)


def _mean_loss(trainer: Trainer, samples: int | None) -> float | None:
    """Return the mean loss on the first `samples` held-out samples, or on all of them.

    None if there is no held-out data, or if a rank was asked to stop.
    """
    dataset = trainer.components.datasets.validation
    if dataset is None:
        return None
    batches = until_stop_requested(
        evaluation_batches(
            dataset,
            samples=samples,
            microbatch_size=trainer.config.batch.microbatch_size,
            rank=trainer.world.rank,
            world_size=trainer.world.world_size,
        ),
        trainer.is_asked_to_stop,
        trainer.world.group,
    )
    loss = trainer.engine.evaluate(batches)
    if batches.ended_early:
        trainer.stop_unfinished()
        return None
    return loss
