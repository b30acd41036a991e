"""Saves the state of a run, that of its callbacks included, at intervals and at the end."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmp.checkpoint import recovery
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.manifest import Health
from distmp.checkpoint.storage import final_path
from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.failing_together import describe
from distmp.distributed.progress import SAVING, current_phase
from distmp.engine.checkpoints import StateToSave, described_optimizer
from distmp.engine.outcome import WARN_AFTER_SKIPS
from distmp.errors import ConfigError, TrainingError, listed
from distmp.training.callbacks.callback import Callback, PendingStep, TrainingLoop
from distmp.training.run_fingerprint import changes_since
from distmp.utils.dtypes import is_dtensor
from distmp.utils.flat_shard import FlatShard

logger = logging.getLogger("distmp")


class Checkpointing(Callback):
    """Writes the checkpoints of a run.

    A rollback uses it too: `writer` waits for a save, and `save_now` saves the new data position.

    Args:
        run: The training loop, in its state before the first step.
        states: The states of all callbacks.

    Attributes:
        writer: Writes checkpoints in the background.
    """

    def __init__(self, run: TrainingLoop, states: CallbackStates) -> None:
        self._states = states
        # A checkpoint stores what rank 0 has, and `Restarts.resumes` looks for it.
        self._job = run.restarts.job() if run.world.rank == 0 else None
        self.writer = CheckpointWriter(
            run.config.checkpoint,
            run.directory.checkpoints,
            run.world,
            timeout_seconds=60 * run.config.timeout_minutes,
            log=run.console.message,
            on_saved=run.report_save,
            permit=lambda: None if run.lease is None else run.lease.check(),
        )
        self.writer.guard(run.engine.optimizer)
        if run.checkpoint is not None:
            # After a dangerous change, a rollback goes back to what this run has saved.
            same_run = not changes_since(run.checkpoint.state.numbers, run.fingerprint).dangerous
            step, path = run.progress.step, run.checkpoint.path
            # One under another name, such as an abandoned one, is of another branch of the run.
            own = final_path(run.directory.checkpoints, step).resolve()
            self.writer.resumed(step, saved=same_run and path.resolve() == own)
        # The step after which this process started.
        self._first_step = run.progress.step
        # The step after which `keep` has requested a save.
        self._requested: int | None = None

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        """Start the writer; save once where a rollback may need a checkpoint."""
        self.writer.__enter__()
        if trainer.config.divergence.rolls_back and self.writer.saved_step is None:
            self._save(trainer)

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Save if it is due; the last step is saved at the end."""
        if step.step == self._first_step + 1:
            # Raises for an optimizer whose state cannot be saved, before work is lost.
            trainer.engine.state_dict()
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
            TrainingError: If the run is finished, but its weights are unhealthy, or it applied no
                update from the start on or after skipped steps that it resumed from.
        """
        step = trainer.progress.step
        applied, total, skipped = trainer.engine.step_counts.tolist()
        message = _skips_message(step, applied, total, skipped)
        own = step - self._first_step
        without_update = own > 0 and (own < skipped or not applied)
        if finished and (skipped >= WARN_AFTER_SKIPS or without_update):
            raise TrainingError(f"{message}; {self.give_up(trainer, message)}")
        self.save_now(trainer)
        if message and trainer.world.rank == 0:
            before = f"a checkpoint before step {step - skipped} with --resume PATH"
            logger.warning("%s%s", message, f", and continue from {before}" if applied else "")

    def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
        """Wait for a save in the background; raise if the last one failed."""
        self.writer.__exit__(type(error), error)
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
        if trainer.engine.step_counts[2]:
            current_phase.enter(SAVING, transfers=True)
            step, tensors, numbers, held, health = self._state(trainer)
            marked = health._replace(problem=health.problem or problem.partition(";")[0])
            self.writer.overwrite = True  # it may be saved already, as healthy
            self.writer.save(step, tensors, numbers, held, marked, wait=True)
        return trainer.world.ranks.from_rank_0(lambda: _last_healthy(trainer.directory.checkpoints))

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
            **trainer.fingerprint,
            **self._states.numbers(),
            "job": self._job,
        }
        return step, tensors, numbers, held, health


def _last_healthy(directory: Path) -> str:
    try:
        healthy = recovery.newest_healthy(directory)
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


# Note [State of callbacks in checkpoints]
# Tensors are stored as `callbacks/NAME/KEY`, other values in the numbers of the checkpoint. NAME is
# the name of the class. If several callbacks have the same one, their options follow it, so that
# another order in the configuration does not exchange their states, and then a number.
PREFIX = "callbacks/"
# Entry of a checkpoint's numbers.
NUMBERS = "callbacks"

State = dict[str, Any]


class CallbackStates:
    """Saves and restores what `Callback.state_dict` returns.

    Args:
        quiet: Do not log warnings; True on all ranks but rank 0.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._callbacks: dict[str, Callback] = {}
        self._quiet = quiet

    def register(self, callbacks: Sequence[Callback], options: Mapping[int, Any]) -> None:
        """Set the callbacks: all callbacks of the run, in the same order on every rank.

        Args:
            callbacks: The callbacks.
            options: The options of those of the setting `callbacks`, by `id`.
        """
        self._callbacks = dict(_named(callbacks, options))

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of all callbacks, by their names in a checkpoint."""
        return {
            _stored_name(name, key): value
            for name, state in self._states().items()
            for key, value in state.items()
            if _is_named_tensor(key, value)
        }

    def check(self) -> None:
        """Refuse states that a checkpoint cannot store.

        Raises:
            ConfigError: Naming the first callback with such a state.
        """
        for name, values in self._values():
            if (problem := _unsuitable(values)) is not None:
                raise ConfigError(f"state_dict() of callback {name}", values, problem)

    def numbers(self) -> dict[str, Any]:
        """Return the other values of all callbacks, as an entry of a checkpoint's numbers.

        A state that became unsuitable during the run is left out with a warning, so that the rest
        of the checkpoint is saved.
        """
        numbers = {}
        for name, values in self._values():
            problem = _unsuitable(values)
            if problem is None:
                numbers[name] = values
            elif not self._quiet:
                logger.warning(
                    "state_dict() of callback %s is not saved: %r %s", name, values, problem
                )
        return {NUMBERS: numbers} if numbers else {}

    def _values(self) -> Iterator[tuple[str, State]]:
        for name, state in self._states().items():
            values = {key: v for key, v in state.items() if not _is_named_tensor(key, v)}
            if values:
                yield name, values

    def restore(self, checkpoint: StoredCheckpoint, log: Callable[[str], object]) -> None:
        """Load the states in a checkpoint. Collective over all ranks.

        Sharded tensors are loaded in place into those that `state_dict` returns, all others into
        new tensors.

        Args:
            checkpoint: The checkpoint.
            log: Receives a message if it has the states of other callbacks than this run.

        Raises:
            CheckpointError: If the checkpoint cannot be read, or a sharded tensor has another
                shape in it.
        """
        live = {name: state for name, state in self._states().items() if state}
        values: dict[str, State] = checkpoint.state.numbers.get(NUMBERS, {})
        tensors: dict[str, State] = {}
        for full, spec in checkpoint.tensors.items():
            if full.startswith(PREFIX):
                name, _, key = full.removeprefix(PREFIX).partition("/")
                tensors.setdefault(name, {})[key] = _target(live.get(name, {}).get(key), *spec)
        stored = values.keys() | tensors.keys()
        targets = {
            _stored_name(name, key): tensor
            for name in tensors.keys() & self._callbacks.keys()
            for key, tensor in tensors[name].items()
        }
        if targets:
            checkpoint.load(targets)
        for name, callback in self._callbacks.items():
            if name in stored:
                callback.load_state_dict({**values.get(name, {}), **tensors.get(name, {})})
        if parts := [*_differences(live.keys() - stored, stored - self._callbacks.keys())]:
            log(f"{checkpoint}: the checkpoint {' and '.join(parts)} (callbacks)")

    def _states(self) -> dict[str, State]:
        states = {name: callback.state_dict() for name, callback in self._callbacks.items()}
        for name, state in states.items():
            if not isinstance(state, dict):
                kind = type(state).__name__
                raise ConfigError(f"state_dict() of callback {name}", kind, "return a dict")
        return states


def _named(
    callbacks: Sequence[Callback], options: Mapping[int, Any]
) -> Iterator[tuple[str, Callback]]:
    of_class = Counter(type(callback).__name__ for callback in callbacks)
    used: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        if of_class[name] > 1 and id(callback) in options:
            text = json.dumps(options[id(callback)], sort_keys=True, default=str)
            name = f"{name} {text.replace('/', '|')}"
        used[name] += 1
        yield name if used[name] == 1 else f"{name}-{used[name]}", callback


def _is_named_tensor(key: object, value: object) -> bool:
    """Return whether a checkpoint stores a value of a state as a tensor, by a name."""
    return isinstance(key, str) and isinstance(value, Tensor)


def _stored_name(name: str, key: str) -> str:
    return f"{PREFIX}{name}/{key}"


def _target(live: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the tensor to load into: the live one if it is sharded, else a new one."""
    if isinstance(live, Tensor) and (isinstance(live, FlatShard) or is_dtensor(live)):
        return live
    device = live.device if isinstance(live, Tensor) else torch.device("cpu")
    return torch.empty(shape, dtype=dtype, device=device)


def _unsuitable(values: State) -> str | None:
    """Return why JSON would not return the same values, or None."""
    reason = ""
    try:
        # JSON converts tuples to lists and other keys to strings.
        if repr(json.loads(json.dumps(values))) == repr(values):
            return None
    except (TypeError, ValueError) as error:
        reason = f" ({error})"
    return (
        f"cannot be stored as it is{reason} in a checkpoint; use tensors, or numbers, strings, "
        "None, lists, and dictionaries with string keys"
    )


def _differences(lacking: Collection[str], unused: Collection[str]) -> Iterator[str]:
    if lacking:
        yield f"has no state of {listed(sorted(lacking))}, which starts from scratch"
    if unused:
        yield f"has the state of {listed(sorted(unused))}, which this run does not have"
