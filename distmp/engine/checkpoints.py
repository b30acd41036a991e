"""Checkpoints of an engine: their content, and saves and loads in a custom training loop.

The trainer and `Engine.save` write the same checkpoints: both use `StateToSave` and the
`CheckpointWriter`, and both load with `load_checkpoint`.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from distmp.checkpoint import recovery, storage
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.manifest import Health
from distmp.checkpoint.settings import CheckpointConfig, Retention
from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.comparison import check_same
from distmp.distributed.failing_together import Failure
from distmp.distributed.roll_call import TIMED_OUT
from distmp.distributed.world import World
from distmp.engine.outcome import WARN_AFTER_SKIPS
from distmp.engine.state import GROUP, TensorSpec
from distmp.errors import CheckpointError, ConfigError, TrainingError, listed, require
from distmp.export.running import RunningEngine
from distmp.models.architecture import described
from distmp.utils.files import check_directory_name

logger = logging.getLogger("distmp")

# Timeout of a collective of a save in the background.
TIMEOUT_SECONDS = 1800.0
# Key of the caller's numbers in a checkpoint. All other numbers are those of a run.
OWN_NUMBERS = "custom_loop"
# Key of the class of the optimizer and its base classes, by name.
OPTIMIZER = "optimizer"
# The engine that saves to a directory, by the directory.
_owners: weakref.WeakValueDictionary[Path, SavedEngine] = weakref.WeakValueDictionary()
# Writers with a save in the background, which has to finish before the process ends.
_writing: set[CheckpointWriter] = set()


class SavedEngine(RunningEngine, Protocol):
    """The part of `distmp.Engine` that a checkpoint reads and writes."""

    optimizer: torch.optim.Optimizer
    holds_average: bool

    def prepare_to_load(self, stored: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Return the live tensors to load."""

    def finish_loading(self, live: Mapping[str, Tensor]) -> None:
        """Continue from values that were loaded into the live tensors."""


class StateToSave(NamedTuple):
    """The state of an engine as `CheckpointWriter.save` takes it.

    Attributes:
        step: Number of steps taken, skipped ones included.
        tensors: Result of `Engine.state_dict`.
        held: Names of the tensors that only an update of the optimizer changes.
        health: Whether training should continue from the state.

    Example:
        >>> import torch, distmp
        >>> engine = distmp.Engine(
        ...     torch.nn.Linear(8, 4),
        ...     lambda module, batch: (module(batch).square().sum(), len(batch)),
        ...     lambda named: torch.optim.AdamW(named, fused=True),
        ...     policy="fp32",
        ... )
        >>> StateToSave.of(engine).health
        Health(problem=None, skipped_in_a_row=0)
    """

    step: int
    tensors: dict[str, Tensor]
    held: set[str]
    health: Health

    @classmethod
    def of(cls, engine: SavedEngine) -> StateToSave:
        """Return the state of an engine; the host waits for its last step.

        Raises:
            TrainingError: If an average replaces the weights.
        """
        if engine.holds_average:
            raise TrainingError(
                "a checkpoint inside of average.as_weights() would have the average in place of "
                "the weights; save after it, or use engine.export(directory) for the average"
            )
        tensors = engine.state_dict()
        applied, unapplied, skipped = tensors["engine/counts"].tolist()
        problem = f"the last {skipped} steps were all skipped"
        health = Health(problem if skipped >= WARN_AFTER_SKIPS else None, skipped)
        return cls(applied + unapplied, tensors, engine.updated_by_optimizer(), health)


def described_optimizer(engine: SavedEngine) -> dict[str, list[str]]:
    """Return the class of the optimizer and its base classes, as an entry of the numbers."""
    bases = type(engine.optimizer).__mro__
    names = [base.__name__ for base in bases if base is not torch.optim.Optimizer]
    return {OPTIMIZER: [name for name in names if name != "object"]}


def check_optimizer(engine: SavedEngine, checkpoint: StoredCheckpoint) -> None:
    """Refuse the state of another class of optimizer, which would be loaded without effect.

    Raises:
        ConfigError: If the classes have no base class in common.
    """
    own = described_optimizer(engine)[OPTIMIZER]
    stored = checkpoint.state.numbers.get(OPTIMIZER, own)
    problem = (
        f"has the state of the optimizer {stored[0]}, and this engine has {own[0]}; continue with "
        f"{stored[0]}, or with its weights only: engine.load(directory, optimizer=False), or in "
        "the trainer a new run with model.weights, from `distmp export`"
    )
    require(not {*stored}.isdisjoint(own), "directory", str(checkpoint), problem)


class Saves:
    """Writes the checkpoints of an engine in a custom training loop. All ranks make the same calls.

    Args:
        world: The ranks.

    Attributes:
        writer: Writes one checkpoint at a time.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_open = False
        self.writer = CheckpointWriter(
            CheckpointConfig(),
            Path(),
            world,
            timeout_seconds=TIMEOUT_SECONDS,
            log=self._log,
            overwrite=True,
        )

    def save(
        self,
        directory: str | Path,
        engine: SavedEngine,
        numbers: Mapping[str, Any] | None,
        keep: int | None,
        *,
        wait: bool,
    ) -> Path:
        """Write a checkpoint, see `Engine.save`."""
        location, retention, own = self._world.ranks.all_or_own_error(
            lambda: (_own_location(directory, engine), _retention(keep), _checked(numbers))
        )
        _owners[location] = engine
        compared = {f"numbers[{name!r}]": repr(value) for name, value in own.items()}
        # A rank that waits would write in another process group than one that does not.
        compared |= {"directory": str(directory), "keep": repr(keep), "wait": repr(bool(wait))}
        check_same(self._world.group, self._world.device, compared)
        self.finish()
        _finish_others(location)
        step, tensors, held, health = StateToSave.of(engine)
        self.writer.redirect(location, retention)
        if not wait:
            self._open(engine)
        stored = {"step": step, **_data_position(own), OWN_NUMBERS: own}
        stored |= {"model": described(engine.model), **described_optimizer(engine)}
        self.writer.save(step, tensors, stored, held, health, wait=wait)
        if wait:
            self._check()
        else:
            _writing.add(self.writer)
        return storage.final_path(Path(directory), step)

    def finish(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: The same on all ranks, if it failed.
        """
        self.writer.finish()
        _writing.discard(self.writer)
        self._check()

    def _check(self) -> None:
        self._world.ranks.all_or_none(
            self.writer.check,
            catch=CheckpointError,
            error=lambda failures, _: _first_cause(failures.values()),
        )

    def _open(self, engine: SavedEngine) -> None:
        """Prepare saves in the background."""
        if self._is_open:
            return
        self.writer.__enter__()
        self.writer.guard(engine.optimizer)
        writer = self.writer
        engine.optimizer.register_step_post_hook(lambda *_: writer.report())
        atexit.unregister(_finish_all)
        atexit.register(_finish_all)  # after the handler that leaves the process group
        self._is_open = True

    def _log(self, message: str) -> None:
        if self._world.rank == 0:
            logger.error("%s", message)


def _finish_others(directory: Path | None = None) -> None:
    """Wait for saves of other engines, which may be deleted, to a directory; None for any."""
    for writer in [each for each in _writing if directory in (None, each.directory)]:
        writer.finish()
        _writing.discard(writer)


def _finish_all() -> None:
    """Wait for saves in the background at the end of the process, and log those that failed."""
    error = getattr(sys, "last_value", None)  # the exception that ends the process, if any
    while _writing:
        _writing.pop().__exit__(type(error) if error else None, error, None)


def _first_cause(failures: Iterable[Failure]) -> CheckpointError:
    """Return the error of a rank that did not only wait for others, if there is one."""
    return CheckpointError(min((f.message for f in failures), key=lambda text: TIMED_OUT in text))


def _own_location(directory: str | Path, engine: SavedEngine) -> Path:
    """Return the path of the directory; refuse one to which another engine saves.

    Raises:
        ConfigError: If it is named like a file, or checkpoints of both would replace each other.
    """
    check_directory_name("directory", directory)
    location = storage.locate("directory", str(directory)).resolve()
    if _owners.get(location, engine) is not engine:
        gc.collect()  # the other engine may have been deleted
    problem = (
        "another engine of this process saves its checkpoints there, which would be replaced; "
        "save each engine to its own directory"
    )
    require(_owners.get(location, engine) is engine, "directory", str(directory), problem)
    return location


def _checked(numbers: Mapping[str, Any] | None) -> dict[str, Any]:
    advice = "pass a dict of numbers, strings, lists, and dicts with string keys"
    try:
        own = dict(numbers or {})
        loaded = json.loads(json.dumps(own))
    except (TypeError, ValueError) as error:
        raise ConfigError("numbers", numbers, f"cannot be stored ({error}); {advice}") from error
    require(repr(loaded) == repr(own), "numbers", own, f"would load as {loaded!r}; {advice}")
    return own


def _retention(keep: int | None) -> Retention:
    valid = keep is None or (type(keep) is int and keep >= 1)
    require(valid, "keep", keep, "use 1 or more checkpoints, or None to keep all")
    return Retention(sys.maxsize if keep is None else keep)


def _data_position(own: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of samples consumed, from which the trainer continues; {} if unknown."""
    samples = own.get("samples")
    return {"samples": samples} if type(samples) is int and samples >= 0 else {}


def load(
    engine: SavedEngine, directory: str | Path, *, missing_ok: bool, optimizer: bool
) -> dict[str, Any] | None:
    """Load a checkpoint, see `Engine.load`; None if there is none. Collective over all ranks."""
    compared = {"directory": str(directory), "optimizer": repr(bool(optimizer))}
    check_same(engine.world.group, engine.world.device, compared)
    _finish_others()
    checkpoint = recovery.resolve(
        str(directory), Path(), setting="directory", missing_ok=missing_ok
    )
    if checkpoint is None:
        return None
    load_checkpoint(engine, checkpoint, optimizer=optimizer)
    numbers = checkpoint.state.numbers
    return {"step": checkpoint.state.step, **numbers.get(OWN_NUMBERS, numbers)}


def load_checkpoint(
    engine: SavedEngine, checkpoint: StoredCheckpoint, *, optimizer: bool = True
) -> None:
    """Load a checkpoint into an engine. Collective over all ranks.

    Args:
        engine: Receives the state; unchanged if the weights do not fit.
        checkpoint: Verified.
        optimizer: Whether to load the optimizer state; otherwise it starts from scratch, with the
            learning rates of the engine.

    Raises:
        CheckpointError: If the checkpoint cannot be read or does not match the engine.
        ConfigError: If it has the state of another optimizer.
    """
    if optimizer:
        check_optimizer(engine, checkpoint)
    goal = f"load {checkpoint}"
    storage.all_or_checkpoint_error(
        engine.world.ranks, goal, lambda: _check_weights(engine.state_dict(), checkpoint)
    )
    stored = checkpoint.tensors
    if not optimizer:
        stored = {name: kind for name, kind in stored.items() if not name.startswith("optimizer/")}
    live = engine.prepare_to_load(stored)
    if not optimizer:
        of_optimizer = ("optimizer/", GROUP)
        live = {name: tensor for name, tensor in live.items() if not name.startswith(of_optimizer)}
    checkpoint.load(live)
    step, taken = checkpoint.state.step, int(live["engine/counts"][:2].sum())
    if step != taken:
        raise CheckpointError(
            f"{checkpoint} cannot be used: its tensors are of step {taken}, not {step}"
        )
    engine.finish_loading(live)


def _check_weights(state: Mapping[str, Tensor], checkpoint: StoredCheckpoint) -> None:
    """Check that a checkpoint holds the weights of this model, before anything is changed.

    Raises:
        CheckpointError: If it lacks one, has another one, or has it in another shape.
    """
    weights = {name: tensor for name, tensor in state.items() if name.startswith("model/")}
    checkpoint.check_fit(weights)
    stored = {name for name in checkpoint.tensors if name.startswith("model/")}
    if others := sorted(stored - weights.keys()):
        raise CheckpointError(
            f"it holds {listed(others)}, which this model does not have; build the model that was "
            "saved"
        )
