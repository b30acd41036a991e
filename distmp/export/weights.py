"""Loads a directory of safetensors into a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from distmp.distributed.progress import current_phase
from distmp.errors import ConfigError, keys_by_value, listed
from distmp.export.files import INDEX
from distmp.models import adapters
from distmp.models.architecture import TRANSFORMER, read, rebuild
from distmp.models.huggingface_files import CONFIG_FILE
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.utils.flat_shard import global_shape, local_parts
from distmp.utils.tensor_trees import set_extra_state

SETTING = "model.weights"
PREFIX = "model/"
_SINGLE_FILE = "model.safetensors"

State = Mapping[str, Tensor]
"""Tensors by name."""


def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Load the weights in a directory of safetensors, or in one such file, into a model.

    Values are converted to the dtypes of the model's tensors. A tied weight may be stored under any
    of its names.

    Args:
        model: All its parameters and persistent buffers are overwritten.
        directory: A directory from `distmp export` or another program, with the names of the
            model's `state_dict`; or a file.

    Raises:
        ConfigError: If the weights do not fit; one message lists all misfits, and the model is
            unchanged.

    Example:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> from distmp.export.weights import load_weights
        >>> save_file({"weight": torch.ones(1, 4)}, "model.safetensors")
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> load_weights(model, "model.safetensors")
        >>> model.weight.tolist()
        [[1.0, 1.0, 1.0, 1.0]]
    """
    state = model.state_dict(keep_vars=True)
    _load(state, StoredWeights(Path(directory)), _dimensions(model))
    set_extra_state(model, state)


def read_shards(state: State, built: BuiltModel, weights: StoredWeights) -> None:
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


@dataclass(frozen=True)
class StoredWeights:
    """Weights in safetensors.

    Attributes:
        path: A directory, or a file.
        name: Value of `model.name` if it names the directory of a Hugging Face model, whose files
            may have more tensors than the model; None: the weights are the value of
            `model.weights`.
    """

    path: Path
    name: str | None = None

    def error(self, problem: str) -> ConfigError:
        """Return an error that names the setting the user wrote."""
        if self.name is not None:
            return ConfigError("model.name", self.name, problem)
        return ConfigError(SETTING, str(self.path), problem)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor by name.

        Raises:
            ConfigError: If a file cannot be read, or files and index contradict each other.
        """
        return {
            name: opened.get_slice(name).get_shape()
            for opened, names in self.files()
            for name in names
        }

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether stored tensors hold the same values, which are read without a copy."""
        held = [
            opened.get_tensor(name)
            for opened, found in self.files()
            for name in found
            if name in names
        ]
        return all(each.shape == held[0].shape and bool((each == held[0]).all()) for each in held)

    def files(self) -> Iterator[tuple[Any, list[str]]]:
        """Open one file after the other, with the names of the tensors that are read from it.

        An open file is mapped to memory.

        Raises:
            ConfigError: If a file cannot be read, or files and index contradict each other.
        """
        holders: dict[str, str] = {}
        for file, indexed in self._contents().items():
            with self._open(file) as opened:
                held = opened.keys()
                names = held if indexed is None else indexed
                if absent := sorted(set(names) - set(held)):
                    raise self._index_error(
                        f"places in {file.name} what it lacks: {listed(absent)}"
                    )
                for name in names:
                    if (other := holders.setdefault(name, file.name)) != file.name:
                        raise self.error(
                            f"{other} and {file.name} both have {name}; keep the files of one model"
                            f", or add its {INDEX}"
                        )
                yield opened, names

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            problem = f"{file} cannot be read: {error}; copy or download it again"
            raise self.error(problem) from error

    def _contents(self) -> Mapping[Path, list[str] | None]:
        """Return the files, and the tensors to read from each; None: all of them.

        The order is that of transformers: one file, an index. Without both, all files count.
        """
        single = self.path if os.path.isfile(self.path) else self.path / _SINGLE_FILE
        if os.path.isfile(single):
            return {single: None}
        if os.path.isfile(self.path / INDEX):
            return self._indexed()
        is_directory = os.path.isdir(self.path)
        files = sorted(self.path.glob("*.safetensors")) if is_directory else []
        if not files:
            problem = "has no *.safetensors" if is_directory else "cannot be found"
            raise self.error(f"{self.path.absolute()} {problem}")
        return dict.fromkeys(files)

    def _indexed(self) -> dict[Path, list[str]]:
        try:
            index = json.loads((self.path / INDEX).read_text())
        except (OSError, ValueError) as error:
            raise self._index_error(f"cannot be read: {error}") from error
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not places:
            raise self._index_error("has no 'weight_map' with the file of each tensor")
        names = keys_by_value({name: str(file) for name, file in places.items()})
        here = {file.name for file in self.path.iterdir() if file.is_file()}
        if absent := sorted(names.keys() - here):
            raise self._index_error(f"names files that are not in the directory: {listed(absent)}")
        return {self.path / file: names[file] for file in sorted(names)}

    def _index_error(self, problem: str) -> ConfigError:
        return self.error(f"{self.path / INDEX} {problem}; save or download the directory again")


class BuiltModel(NamedTuple):
    """A model before an engine was built on it.

    Attributes:
        names: For each name in its `state_dict`, the first name of the same tensor. Adapters are
            left out, and the names are those without adapters.
        dimensions: Configuration of distmp's transformer; None for another model.
    """

    names: dict[str, str]
    dimensions: TransformerConfig | None

    @classmethod
    def of(cls, model: nn.Module, *, has_adapters: bool = False) -> BuiltModel:
        """Describe a model, perhaps with the adapters of `model.peft`."""
        first: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        if has_adapters:
            own = [name for name in names if not adapters.is_adapter(name)]
            names = {adapters.stored_name(name): names[name] for name in own}
        return cls(names, _dimensions(model))


def load_model(directory: str | Path) -> nn.Module:
    """Return distmp's transformer from an exported directory, in FP32 on the CPU.

    Raises:
        ConfigError: If the directory has another kind of model, or its weights do not fit.

    Example:
        >>> import torch, distmp
        >>> from distmp.export.weights import load_model
        >>> from distmp.models.loss import next_token_loss
        >>> from distmp.models.transformer import Transformer, TransformerConfig
        >>> config = TransformerConfig(
        ...     vocabulary_size=11, sequence_length=8, layers=1, dimension=8, heads=2, hidden=8
        ... )
        >>> adamw = lambda named: torch.optim.AdamW(named, fused=True)
        >>> engine = distmp.Engine(Transformer(config), next_token_loss, adamw, policy="fp32")
        >>> engine.export("weights")
        >>> load_model("weights").config.dimension
        8
    """
    model = rebuild(directory)
    load_weights(model, directory)
    return model


@torch.no_grad()
def _load(state: State, weights: StoredWeights, config: TransformerConfig | None) -> None:
    if problems := [*misfits(state, weights), *_other_dimensions(config, weights.path)]:
        raise weights.error(f"does not fit the model: {'; '.join(problems)}")
    for opened, names in weights.files():
        for name in state.keys() & names:
            current_phase.touch()
            for index, part in local_parts(state[name]):
                part.copy_(opened.get_slice(name)[index] if index else opened.get_tensor(name))


def _dimensions(model: nn.Module) -> TransformerConfig | None:
    return model.config if isinstance(model, Transformer) else None


def misfits(state: State, weights: StoredWeights) -> Iterator[str]:
    """Yield why stored weights do not fit the state of a model, a phrase for each reason.

    Raises:
        ConfigError: If they cannot be read.
    """
    stored = weights.shapes()
    shared = sorted(stored.keys() & state.keys())
    # A tied weight has several names and needs one of them.
    filled = keys_by_value({name: id(state[name]) for name in shared})
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    unknown = [name for name in stored if name not in state and weights.name is None]
    wanted = {name: [*global_shape(state[name])] for name in shared}
    shapes = [
        f"{name} {stored[name]} for {shape}"
        for name, shape in wanted.items()
        if stored[name] != shape
    ]
    for problem, names in (("missing", missing), ("unknown", unknown), ("other shape", shapes)):
        if names:
            yield f"{problem}: {listed(sorted(names))}"
    for names in filled.values():
        if len(names) > 1 and not weights.are_equal(names):
            yield f"different values of a tied weight: {listed(names)}"


def _other_dimensions(config: TransformerConfig | None, path: Path) -> Iterator[str]:
    """Yield dimensions that differ but do not change shapes, such as the number of heads."""
    directory = path.parent if path.is_file() else path
    if config is None or not (directory / CONFIG_FILE).is_file():
        return
    described = read(directory)
    if described.get("model_type") != TRANSFORMER:
        return
    own = asdict(config)
    for name, value in described.items():
        # The weights do not depend on the longest sequence.
        if name != "sequence_length" and own.get(name, value) != value:
            yield f"{name} = {value} for {own[name]}"
