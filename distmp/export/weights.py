"""Loads a folder of safetensors into a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from distmp.errors import ConfigError, listed
from distmp.models.architecture import CONFIG_FILE, TRANSFORMER, read, rebuild
from distmp.models.transformer import Transformer
from distmp.utils.flat_shard import global_shape, local_parts

SETTING = "model.weights"
PREFIX = "model/"


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Load the weights in a folder of safetensors, or in one such file, into a model.

    Values are converted to the dtypes of the model's tensors. A tied weight may be stored under any
    of its names.

    Args:
        model: All its parameters and persistent buffers are overwritten.
        folder: A folder from `distmp export` or another program, with the names of the model's
            `state_dict`; or a file.

    Raises:
        ConfigError: If the weights do not fit; one message lists all misfits, and the model is
            unchanged.
    """
    _load(model.state_dict(keep_vars=True), StoredWeights(Path(folder)), _dimensions(model))


def read_shards(state: Mapping[str, Tensor], built: BuiltModel, weights: StoredWeights) -> None:
    """Read stored weights into the state of an engine, without collectives.

    Each rank reads its shards.

    Args:
        state: Result of `Engine.state_dict`; all parameters and persistent buffers of the model are
            overwritten. `Engine.load_state_dict` then updates what the engine derives from them.
        built: The model of the engine, before the engine was built.
        weights: The weights.

    Raises:
        ConfigError: If the weights do not fit; the state is unchanged.
    """
    targets = {name: state[f"{PREFIX}{first}"] for name, first in built.names.items()}
    _load(targets, weights, built.dimensions)


def misfits(model: nn.Module, weights: StoredWeights) -> list[str]:
    """Return why stored weights do not fit a model, a phrase for each reason.

    Raises:
        ConfigError: If they cannot be read.
    """
    with weights.opened() as stored:
        return [
            *_misfits(model.state_dict(keep_vars=True), stored, weights),
            *_other_dimensions(_dimensions(model), weights.path),
        ]


@dataclass(frozen=True)
class StoredWeights:
    """Weights in safetensors.

    Attributes:
        path: A folder, or a file.
        may_have_more: Whether tensors that the model does not have are ignored.
    """

    path: Path
    may_have_more: bool = False

    @contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """Open the files; return for each tensor by name the file that has it.

        Raises:
            ConfigError: If a file cannot be read, also inside the context.
        """
        stored: dict[str, Any] = {}
        try:
            for file in _files(self.path):
                opened = safe_open(file, framework="pt")
                stored.update((name, opened) for name in opened.keys())  # noqa: SIM118 - no dictionary
            yield stored
        except (OSError, SafetensorError) as error:
            raise ConfigError(SETTING, str(self.path), f"cannot be read: {error}") from error


class BuiltModel(NamedTuple):
    """A model before an engine was built on it.

    Attributes:
        names: For each name in its `state_dict`, the first name of the same tensor.
        dimensions: Dimensions of distmp's transformer; None for another model.
    """

    names: dict[str, str]
    dimensions: dict[str, Any] | None

    @classmethod
    def of(cls, model: nn.Module) -> BuiltModel:
        """Describe a model."""
        first: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        return cls(names, _dimensions(model))


def load_model(folder: str | Path) -> nn.Module:
    """Return distmp's transformer from an exported folder, in FP32 on the CPU.

    Raises:
        ConfigError: If the folder has another kind of model, or its weights do not fit.
    """
    model = rebuild(folder)
    load_weights(model, folder)
    return model


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        problem = "has no *.safetensors" if path.is_dir() else "does not exist"
        raise ConfigError(SETTING, str(path), f"{path.absolute()} {problem}")
    return files


@torch.no_grad()
def _load(
    targets: Mapping[str, Tensor], weights: StoredWeights, dimensions: dict[str, Any] | None
) -> None:
    with weights.opened() as stored:
        problems = [
            *_misfits(targets, stored, weights),
            *_other_dimensions(dimensions, weights.path),
        ]
        if problems:
            raise ConfigError(
                SETTING, str(weights.path), f"does not fit the model: {'; '.join(problems)}"
            )
        for name in stored.keys() & targets.keys():
            for index, part in local_parts(targets[name]):
                opened = stored[name]
                part.copy_(opened.get_slice(name)[index] if index else opened.get_tensor(name))


def _dimensions(model: nn.Module) -> dict[str, Any] | None:
    return asdict(model.config) if isinstance(model, Transformer) else None


def _misfits(
    state: Mapping[str, Tensor], stored: Mapping[str, Any], weights: StoredWeights
) -> Iterator[str]:
    """Yield a phrase for each kind of misfit."""
    # By identity: a tied weight has several names and needs one of them.
    filled = {id(state[name]) for name in stored if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    unknown = [name for name in stored if name not in state and not weights.may_have_more]
    shapes = []
    for name, opened in stored.items():
        if name in state:
            shape = opened.get_slice(name).get_shape()
            if shape != [*global_shape(state[name])]:
                shapes.append(f"{name} {shape} for {[*global_shape(state[name])]}")
    for problem, names in (("missing", missing), ("unknown", unknown), ("other shape", shapes)):
        if names:
            yield f"{problem}: {listed(names)}"


def _other_dimensions(own: dict[str, Any] | None, folder: Path) -> Iterator[str]:
    """Yield dimensions that differ but do not change shapes, such as the number of heads."""
    if own is None or not (folder / CONFIG_FILE).is_file():
        return
    described = read(folder)
    if described.pop("model_type") == TRANSFORMER:
        for name, value in described.items():
            # The weights do not depend on the longest sequence.
            if name != "sequence_length" and own.get(name, value) != value:
                yield f"{name} = {value} for {own[name]}"
