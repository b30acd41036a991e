"""The protocol between the training loop and its callbacks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distmp.diagnosis.attribution import OverflowReport
from distmp.engine.outcome import StepNumbers, StepOutcome, describe_spike
from distmp.engine.settings import DivergenceConfig
from distmp.telemetry.measurements import StepTimer
from distmp.training.run import Run


class SpikeAction(NamedTuple):
    """The action for a step that is out of bounds.

    Attributes:
        problem: What is out of bounds, as text.
        action: "warn", "skip" or "rollback".
    """

    problem: str
    action: str


def action_for(numbers: StepNumbers, config: DivergenceConfig) -> SpikeAction | None:
    """Return the action for a step, or None if there is none; the same on every rank."""
    if numbers.weight > 0 and not math.isfinite(numbers.loss):
        problem = f"the loss is {numbers.loss}"
        action = "rollback" if config.rolls_back else "skip"
    elif numbers.spike:
        problem, action = describe_spike(numbers), config.on_spike
    else:
        return None
    return None if action == "ignore" else SpikeAction(problem, action)


@dataclass
class PendingStep:
    """A step that `Engine.step` has launched and whose numbers have not been read.

    Attributes:
        step: Number of the step, counted from 1.
        samples: Samples consumed by all ranks together, this step included.
        outcome: The numbers of the step. Reading them makes the host wait for the device.
        seconds: Time since the previous step was launched, without pauses.
        validation_loss: Mean loss on held-out data after this step; None without a validation, and
            in the last step, which is validated after its save: see `Callback.on_validation`.
        validation_metrics: Metrics on held-out data after this step, by name.
    """

    step: int
    samples: int
    outcome: StepOutcome
    seconds: float
    validation_loss: float | None = None
    validation_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class StepResult(PendingStep):
    """A step whose numbers have been read; the same on every rank, except for `seconds`.

    It also has the attributes of `PendingStep`.

    Attributes:
        numbers: Loss, gradient norm, learning rate and the rest of the step, as plain numbers.
        overflow: Why the step was skipped, if a gradient was not finite and attribution is on.
        spike: The action for a loss or norm that is out of bounds; None without one.
        rank_seconds: Compute seconds per step of each rank; None in steps without a comparison.
    """

    numbers: StepNumbers
    overflow: OverflowReport | None = None
    spike: SpikeAction | None = None
    rank_seconds: list[float] | None = None

    @property
    def rolls_back(self) -> bool:
        """Whether the run goes back to a checkpoint from before this step."""
        return self.spike is not None and self.spike.action == "rollback"


class Rollback(NamedTuple):
    """A return to an earlier checkpoint.

    Attributes:
        from_step: The step that was out of bounds.
        to_step: The step of the checkpoint. The next step is `to_step` + 1.
        problem: What was out of bounds, as text.
        samples_skipped: Samples of all ranks between the checkpoint and the new data position.
    """

    from_step: int
    to_step: int
    problem: str
    samples_skipped: int


class TrainingLoop(Run):
    """What callbacks may read and call; the trainer implements it.

    Attributes:
        config: The configuration of the run.
        world: The ranks.
        console: Prints messages; quiet on all ranks but the first.
        engine: Takes the steps; holds model, optimizer and loss scale.
        directory: The directory of the run.
        progress: Steps and samples up to now.
        timer: Measures the time of steps.
        pending: The step that was launched last, until its numbers are read.
        rollback_from: The step that was out of bounds, until the run has gone back to a checkpoint.
    """

    timer: StepTimer
    pending: PendingStep | None
    rollback_from: StepResult | None

    def read_step(self) -> None:
        """Read the numbers of the step that was launched last, if they have not been read.

        The host waits for that step. Every callback receives the numbers. Collective.
        """

    def report_validation(self, loss: float, metrics: Mapping[str, float]) -> None:
        """Pass loss and metrics on held-out data to the record of the step and to all callbacks."""

    def report_save(self, step: int, seconds: float) -> None:
        """Report a complete checkpoint to all callbacks."""

    @abstractmethod
    def is_asked_to_stop(self) -> bool:
        """Return whether this rank has a request to stop, from a signal or a callback."""

    def stop_unfinished(self) -> None:
        """Stop after this step as unfinished: the run has to be resumed. Call it on every rank."""

    def finish_early(self, reason: str) -> None:
        """End the run after this step as finished, with exit code 0. Call it on every rank.

        Args:
            reason: Completes "finished after step N: ...".
        """


class Callback:
    """Base class of callbacks of the training loop. Override the hooks that you need.

    Callbacks are called in order: first those of the setting `callbacks`, then those given to
    `Trainer`. The built-in callbacks log and validate a step before them and save it after them.
    Each hook receives the trainer, see `TrainingLoop`.

    Hooks at the start: `setup`; then `load_state_dict`, if a checkpoint with the state of this
    callback is loaded; then `on_train_begin`. A rollback calls `load_state_dict`, then
    `on_rollback`.

    Ranks: every hook is called on every rank, in the same step and in the same order, except for
    `stop_reason`, `on_save` and `on_exit`. A hook may call collectives if it does so on every rank.
    To do something on one rank only, check `trainer.world.rank`.

    Speed: `Engine.step` returns while a GPU still computes the step. The loop therefore reads the
    numbers of a step after it has launched the next one, and calls `on_step_end` then. Work that is
    not part of training belongs in `with trainer.timer.paused():`, which excludes it from the
    time of the step.

    Errors: an exception ends the run on all ranks, with the traceback of the rank that raised it
    first. Raise a `distmp.errors.DistmpError` on every rank for a plain message without traceback.

    Example:
        >>> from distmp.training.callbacks import Callback, PendingStep, Rollback
        >>> from distmp.training.callbacks import StepResult, TrainingLoop
        >>> class Losses(Callback):
        ...     def __init__(self) -> None:
        ...         self.losses: dict[int, float] = {}
        ...
        ...     def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        ...         self.samples = step.samples
        ...
        ...     def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        ...         self.losses[result.step] = result.numbers.loss
        ...
        ...     def on_rollback(self, trainer: TrainingLoop, rollback: Rollback) -> None:
        ...         kept = range(rollback.to_step + 1)
        ...         self.losses = {step: loss for step, loss in self.losses.items() if step in kept}
        >>> from distmp.train import main
        >>> options = "--run-dir runs/losses --steps 2 --strategy single --log.console off"
        >>> options += " --data.path distmp --data.sequence-length 16"
        >>> options += " --batch.global-batch-size 2 --batch.microbatch-size 2"
        >>> options += " --validation.final-samples 2"
        >>> losses = Losses()
        >>> main(options.split(), callbacks=[losses])
        0
        >>> list(losses.losses)
        [1, 2]
    """

    def setup(self, trainer: TrainingLoop) -> None:
        """Called once, before everything else: create tensors that `state_dict` returns here.

        The engine has the weights of the checkpoint, if any.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores of this callback, by key.

        Values are tensors, or what JSON keeps: numbers, strings, None, lists, and dictionaries with
        string keys. Plain tensors and all other values have to be the same on every rank.
        `DTensor`s and `FlatShard`s are stored by all ranks together, and load at another number of
        ranks; return them from `setup` on. Called on every rank, without collectives.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` has returned.

        Not called if the checkpoint has no state of this callback.

        Args:
            state: The values by key. Sharded tensors are those that `state_dict` returns, already
                with the stored values; other tensors are new ones.
        """

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        """Called once, before the first step. The checkpoint, if any, has been loaded.

        Workers of the dataset have started: change the dataset in `setup`.
        """

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        """Called before a step.

        Args:
            trainer: The trainer.
            step: Number of the step that begins, counted from 1.
        """

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Called when `Engine.step` has returned; a GPU may still be computing the step.

        Use it for work that needs the model after this step, such as a validation or a
        save. `trainer.read_step()` reads the numbers of the step immediately, and the host waits.

        Args:
            trainer: The trainer.
            step: The step, not yet read.
        """

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Called with the numbers of a step, once for each step and in order.

        On a GPU the next step has been launched by then, so that the weights are no longer those
        of this step. Skipped steps are reported like all others. After a rollback the step
        numbers continue from that of the checkpoint, see `on_rollback`.

        Args:
            trainer: The trainer.
            result: The numbers of the step.
        """

    def on_validation(
        self, trainer: TrainingLoop, loss: float, metrics: Mapping[str, float]
    ) -> None:
        """Called after a validation.

        Args:
            trainer: The trainer. `trainer.progress.step` is the step that was validated.
            loss: Mean loss on held-out data, the same on every rank.
            metrics: Values of `validation.metrics` by name, the same on every rank. Those of the
                average of the weights, if there is one, have the prefix `ema_`.
        """

    def on_save(self, trainer: TrainingLoop, step: int, seconds: float) -> None:
        """Called when a checkpoint is complete.

        Checkpoints are written in the background and ranks may notice the end of a save in
        different steps: do not call collectives here.

        Args:
            trainer: The trainer.
            step: The step of the checkpoint.
            seconds: Time that the save took.
        """

    def on_rollback(self, trainer: TrainingLoop, rollback: Rollback) -> None:
        """Called when the run has gone back to a checkpoint. Discard data of later steps.

        Args:
            trainer: The trainer, with the state of the checkpoint.
            rollback: From where, to where and why.
        """

    def stop_reason(self, trainer: TrainingLoop) -> str | None:
        """Return why the run should stop, or None to continue.

        Called at least once per step. One rank is enough to stop all of them, after the same step
        and with a checkpoint. It has to be fast, and must not call collectives.
        """
        return None

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Called after the last step, when its checkpoint is complete. Not called after an error.

        Args:
            trainer: The trainer.
            finished: Whether all steps are done. Otherwise the run was asked to stop.
        """

    def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
        """Called last, also after an error: close files and connections here.

        Args:
            trainer: The trainer.
            error: What ended the run; None after `on_train_end`. With an error the other ranks may
                be gone: do not call collectives.
        """
