"""State of callbacks in checkpoints.

Tensors are stored as `callbacks/NAME/KEY`, other values in the numbers of the checkpoint. NAME is
the name of the class, with a number if several callbacks have the same class name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from distmp.checkpoint import store
from distmp.errors import ConfigError, listed
from distmp.training.callbacks.callback import Callback
from distmp.utils.dtypes import is_dtensor
from distmp.utils.flat_shard import FlatShard

PREFIX = "callbacks/"
# Entry of a checkpoint's numbers.
NUMBERS = "callbacks"

State = dict[str, Any]

logger = logging.getLogger("distmp")


class CallbackStates:
    """Saves and restores what `Callback.state_dict` returns.

    Args:
        quiet: Do not log warnings; True on all ranks but rank 0.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._callbacks: dict[str, Callback] = {}
        self._quiet = quiet

    def register(self, callbacks: Sequence[Callback]) -> None:
        """Set the callbacks: all callbacks of the run, in the same order on every rank."""
        self._callbacks = dict(_named(callbacks))

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of all callbacks, by their names in a checkpoint."""
        return {
            _stored_name(name, key): value
            for name, state in self._states().items()
            for key, value in state.items()
            if isinstance(value, Tensor)
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
            values = {key: v for key, v in state.items() if not isinstance(v, Tensor)}
            if values:
                yield name, values

    def restore(self, checkpoint: store.StoredCheckpoint) -> str | None:
        """Load the states in a checkpoint. Collective over all ranks.

        Sharded tensors are loaded in place into those that `state_dict` returns, all others into
        new tensors.

        Returns:
            A message if the checkpoint has the states of other callbacks than this run.

        Raises:
            CheckpointError: If the checkpoint cannot be read, or a sharded tensor has another
                shape in it.
        """
        live = {name: state for name, state in self._states().items() if state}
        values: dict[str, State] = checkpoint.numbers.get(NUMBERS, {})
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
        return _difference(checkpoint, live.keys() - stored, stored - self._callbacks.keys())

    def _states(self) -> dict[str, State]:
        states = {name: callback.state_dict() for name, callback in self._callbacks.items()}
        for name, state in states.items():
            if not isinstance(state, dict):
                kind = type(state).__name__
                raise ConfigError(f"state_dict() of callback {name}", kind, "return a dict")
        return states


def _named(callbacks: Sequence[Callback]) -> Iterator[tuple[str, Callback]]:
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name}-{counts[name]}", callback


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


def _difference(
    checkpoint: store.StoredCheckpoint, lacking: Collection[str], unused: Collection[str]
) -> str | None:
    parts = []
    if lacking:
        parts.append(f"has no state of {listed(sorted(lacking))}, which starts from scratch")
    if unused:
        parts.append(f"has the state of {listed(sorted(unused))}, which this run does not have")
    return f"{checkpoint}: the checkpoint {' and '.join(parts)} (callbacks)" if parts else None
