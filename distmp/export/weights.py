"""Loads a folder of safetensors into a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from distmp.errors import ConfigError, listed
from distmp.models import llama
from distmp.models.architecture import CONFIG_FILE, TRANSFORMER, read, rebuild
from distmp.models.transformer import Transformer, TransformerConfig
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
    _, problems = _compare(model.state_dict(keep_vars=True), weights, _dimensions(model))
    return problems


@dataclass(frozen=True)
class StoredWeights:
    """Weights in safetensors.

    Attributes:
        path: A folder, or a file.
        may_have_more: Whether tensors that the model does not have are ignored.
    """

    path: Path
    may_have_more: bool = False

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor by name.

        Raises:
            ConfigError: If a file cannot be read.
        """
        return {
            name: opened.get_slice(name).get_shape()
            for opened in self.files()
            for name in opened.keys()  # noqa: SIM118 - no dictionary
        }

    def files(self) -> Iterator[Any]:
        """Open one file after the other; an open file is mapped to memory.

        Raises:
            ConfigError: If a file cannot be read.
        """
        try:
            for file in _files(self.path):
                with safe_open(file, framework="pt") as opened:
                    yield opened
        except (OSError, SafetensorError) as error:
            raise ConfigError(SETTING, str(self.path), f"cannot be read: {error}") from error


class BuiltModel(NamedTuple):
    """A model before an engine was built on it.

    Attributes:
        names: For each name in its `state_dict`, the first name of the same tensor.
        dimensions: Configuration of distmp's transformer; None for another model.
    """

    names: dict[str, str]
    dimensions: TransformerConfig | None

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
    state: Mapping[str, Tensor], weights: StoredWeights, config: TransformerConfig | None
) -> None:
    targets, problems = _compare(state, weights, config)
    if problems:
        raise ConfigError(
            SETTING, str(weights.path), f"does not fit the model: {'; '.join(problems)}"
        )
    for opened in weights.files():
        for name in opened.keys() & targets.keys():
            for index, part in targets[name].parts():
                part.copy_(opened.get_slice(name)[index] if index else opened.get_tensor(name))


class _Target(NamedTuple):
    """Where a stored tensor is loaded to: a tensor, or some of its rows.

    Attributes:
        tensor: A DTensor, a `FlatShard` or a plain tensor.
        start: First row.
        stop: One after the last row; None for all of the tensor.
    """

    tensor: Tensor
    start: int = 0
    stop: int | None = None

    @property
    def shape(self) -> list[int]:
        shape = [*global_shape(self.tensor)]
        return shape if self.stop is None else [self.stop - self.start, *shape[1:]]

    @property
    def key(self) -> tuple[int, int]:
        """Equal for the names of a tied weight."""
        return id(self.tensor), self.start

    def parts(self) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield the parts that this rank holds: indices in the stored tensor, and memory."""
        for index, part in local_parts(self.tensor):
            if self.stop is None:
                yield index, part
                continue
            rows, *others = index
            first, end = max(rows.start, self.start), min(rows.stop, self.stop)
            if first < end:
                stored = slice(first - self.start, end - self.start)
                yield (stored, *others), part[first - rows.start : end - rows.start]


def _compare(
    state: Mapping[str, Tensor], weights: StoredWeights, config: TransformerConfig | None
) -> tuple[dict[str, _Target], list[str]]:
    """Return where stored tensors belong, by their names in the files, and why they do not fit."""
    path = weights.path
    described = read(path) if (path / CONFIG_FILE).is_file() else {}
    if config is None or described.get("model_type") not in llama.MODEL_TYPES:
        targets = {name: _Target(tensor) for name, tensor in state.items()}
    else:
        llama.check_same(described, config, str(path))
        targets = {
            theirs: _Target(state[rows.name], rows.start, rows.stop)
            for theirs, rows in llama.rows_by_name(config).items()
        }
    return targets, [*_misfits(targets, weights), *_other_dimensions(config, described)]


def _dimensions(model: nn.Module) -> TransformerConfig | None:
    return model.config if isinstance(model, Transformer) else None


def _misfits(targets: Mapping[str, _Target], weights: StoredWeights) -> Iterator[str]:
    """Yield a phrase for each kind of misfit."""
    stored = weights.shapes()
    # A tied weight has several names and needs one of them.
    filled = {targets[name].key for name in stored if name in targets}
    missing = [name for name, target in targets.items() if target.key not in filled]
    unknown = [name for name in stored if name not in targets and not weights.may_have_more]
    shapes = [
        f"{name} {stored[name]} for {targets[name].shape}"
        for name in stored.keys() & targets.keys()
        if stored[name] != targets[name].shape
    ]
    for problem, names in (("missing", missing), ("unknown", unknown), ("other shape", shapes)):
        if names:
            yield f"{problem}: {listed(sorted(names))}"


def _other_dimensions(
    config: TransformerConfig | None, described: Mapping[str, Any]
) -> Iterator[str]:
    """Yield dimensions that differ but do not change shapes, such as the number of heads."""
    if config is None or described.get("model_type") != TRANSFORMER:
        return
    own = asdict(config)
    for name, value in described.items():
        # The weights do not depend on the longest sequence.
        if name != "sequence_length" and own.get(name, value) != value:
            yield f"{name} = {value} for {own[name]}"
