"""Evaluates the weights and their average every `validation.every` steps, and at the end."""

from __future__ import annotations

import math
import sys
from typing import Any

from distmp.checkpoint.writer import CheckpointWriter
from distmp.config import RunConfig
from distmp.data.evaluation import evaluation_batches
from distmp.data.loading import check_same_data
from distmp.distributed.progress import current_phase
from distmp.distributed.stopping import until_stop_requested
from distmp.engine.average import WeightAverage
from distmp.engine.evaluation import Evaluation
from distmp.engine.settings import EmaConfig
from distmp.models.metrics import find_metrics
from distmp.models.settings import EMA_PREFIX, PERPLEXITY
from distmp.training.callbacks.callback import Callback, PendingStep, Rollback, TrainingLoop
from distmp.training.run import Run

# `math.exp` raises an error for larger numbers.
_LARGEST_LOGARITHM = math.log(sys.float_info.max)


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


def weight_unit(config: RunConfig, weight: float) -> str:
    """Return what the weight of a step counts, in the singular.

    Args:
        config: The configuration.
        weight: Weight of the step.
    """
    if config.model.loss == "next_token":
        return "token"
    # A sample has more than one token or pixel; samples may be masked.
    return "sample" if weight <= config.batch.global_batch_size else "unit"


def loss_unit(config: RunConfig) -> str:
    """Return the unit of the mean loss as a suffix of the number; empty if it is unknown."""
    if config.model.loss != "next_token":
        return ""
    return f" nats per {'byte' if config.data.source == 'text' else 'token'}"


class Validation(Callback):
    """Computes loss and metrics on held-out data; the record of the step contains them.

    Args:
        run: The run.
        ema: Its average of the weights is evaluated, too; None without an average.
        writer: Writes checkpoints; it may be copying the weights.
    """

    def __init__(self, run: Run, ema: Ema | None, writer: CheckpointWriter) -> None:
        self._settings = settings = run.config.validation
        self._dataset = run.model_and_data.datasets.validation
        self._ema = ema
        self._writer = writer
        self._metrics = find_metrics(settings.metrics)
        # The step after the last complete validation, and the last step of the run before this one.
        self._step = self._former_end = 0
        self._end = run.config.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the step that was validated last, and the last one of the run."""
        return {"step": self._step, "end": self._end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what was validated."""
        self._step, self._former_end = state["step"], state["end"]

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        """Evaluate a microbatch per rank, so that a metric that fails does so before the training.

        A validation that was interrupted is repeated. Early stopping also counts the last one of a
        shorter run, which came after its save.
        """
        if self._dataset is not None:
            check_same_data(self._dataset, 1, trainer.world, "data.source (validation)")
        step, stops_early = trainer.progress.step, trainer.config.early_stopping.patience > 0
        counts = stops_early and self._former_end == step < self._end
        if (counts or self._is_due(trainer)) and self._step != step:
            self._validate(trainer, last=False)
        elif self._dataset is not None:
            self._evaluate(trainer, trainer.config.batch.microbatch_size * trainer.world.world_size)

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Validate if it is due; the last step is validated at the end."""
        if self._is_due(trainer):
            self._validate(trainer, last=False)

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Validate the last step, which is saved."""
        if finished and trainer.progress.step >= self._end:
            current_phase.enter("the last validation")
            self._validate(trainer, last=True)

    def _is_due(self, trainer: TrainingLoop) -> bool:
        every, step = self._settings.every, trainer.progress.step
        return every > 0 and step % every == 0 and step < self._end

    def _validate(self, trainer: TrainingLoop, *, last: bool) -> None:
        if self._dataset is None:
            return
        samples = self._settings.final_samples if last else self._settings.samples
        if last:
            trainer.console.message("validating on the held-out samples")
        with trainer.timer.paused():
            found = self._evaluate_both(trainer, samples)
        if found is None:
            return
        self._step = trainer.progress.step
        if last:
            trainer.console.message(f"held-out loss {found.loss:.4f}{loss_unit(trainer.config)}")
            for name, value in found.metrics.items():
                trainer.console.message(f"held-out {name} {value:.4f}")
        trainer.report_validation(found.loss, found.metrics)

    def _evaluate_both(self, trainer: TrainingLoop, samples: int | None) -> Evaluation | None:
        """Evaluate the weights, and then their average, whose metrics get a prefix."""
        found = self._evaluate(trainer, samples)
        if found is None or self._ema is None:
            return found
        self._writer.release()
        with self._ema.average.as_weights():
            averaged = self._evaluate(trainer, samples)
        if averaged is None:
            return None
        metrics = {"loss": averaged.loss, **averaged.metrics}
        prefixed = {f"{EMA_PREFIX}{name}": value for name, value in metrics.items()}
        return Evaluation(found.loss, {**found.metrics, **prefixed})

    def _evaluate(self, trainer: TrainingLoop, samples: int | None) -> Evaluation | None:
        """Evaluate `samples` held-out samples, None for all; return None if a rank is to stop."""
        batches = until_stop_requested(
            evaluation_batches(
                self._dataset, samples, trainer.config.batch.microbatch_size, trainer.world
            ),
            trainer.is_asked_to_stop,
            trainer.world.group,
        )
        found = trainer.engine.evaluate_metrics(batches, self._metrics)
        if batches.ended_early:
            trainer.stop_unfinished()
            return None
        return Evaluation(found.loss, self._with_perplexity(found))

    def _with_perplexity(self, found: Evaluation) -> dict[str, float]:
        """Return all metrics in the order of the settings."""
        perplexity = math.inf if found.loss > _LARGEST_LOGARITHM else math.exp(found.loss)
        return {
            name: perplexity if path == PERPLEXITY else found.metrics[name]
            for name, path in self._settings.metrics.items()
        }
