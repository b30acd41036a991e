"""Exports adapters: as a folder of peft, or merged into the weights of the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmp.export.files import Weights, write_folder
from distmp.export.sources import refuse_infinite
from distmp.models import tokenizer_files
from distmp.models.adapters import Update, base_names, exported_name, is_adapter, merged

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


class AdapterWeights:
    """The parameters of adapters, under the names in peft's files.

    Args:
        source: All weights of the model.

    Attributes:
        specs: Shape and dtype of each tensor, as tensors on the meta device.
    """

    def __init__(self, source: Weights) -> None:
        self._source = source
        self._names = {exported_name(name): name for name in source.specs if is_adapter(name)}
        self.specs = {ours: source.specs[name] for ours, name in self._names.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors on the CPU; raises what the source raises."""
        found = {ours: self._source.read([self._names[ours]]) for ours in names}
        return {ours: value for ours, read in found.items() for value in read.values()}


class MergedWeights:
    """The weights of a model with its adapters merged, under the names without adapters.

    Args:
        source: All weights of the model, with adapters, in FP32.
        updates: How the adapter of each layer changes its weight, by the name of the layer.
        dtype: Dtype of floating-point tensors of up to 32 bits.

    Attributes:
        specs: Shape and dtype of each tensor, as tensors on the meta device.
    """

    def __init__(self, source: Weights, updates: Mapping[str, Update], dtype: torch.dtype) -> None:
        self._source = source
        self._names = base_names(source.specs)
        self._updates = updates
        self._dtype = dtype
        self.specs = {name: self._cast(source.specs[own]) for name, own in self._names.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors on the CPU.

        Raises:
            CheckpointError: If they cannot be read, or a finite weight is infinite in the dtype.
        """
        tensors = {name: self._cast(self._merged(name)) for name in names}
        if self._dtype == torch.float16:
            refuse_infinite(tensors, "the merged model")
        return tensors

    def _merged(self, name: str) -> Tensor:
        weight = self._value(self._names[name])
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or layer not in self._updates:
            return weight
        first, second = (self._value(f"{layer}.lora_{part}.default.weight") for part in "AB")
        return merged(weight, first, second, self._updates[layer])

    def _value(self, name: str) -> Tensor:
        return self._source.read([name])[name]

    def _cast(self, tensor: Tensor) -> Tensor:
        narrow = tensor.is_floating_point() and tensor.itemsize <= 4
        return tensor.to(self._dtype) if narrow else tensor


def updates_of(described: Mapping[str, Any]) -> dict[str, Update]:
    """Return the updates in the result of `distmp.models.adapters.describe`."""
    return {name: Update(*values) for name, values in described["updates"].items()}


def write_adapter(
    folder: Path,
    weights: AdapterWeights,
    described: Mapping[str, Any],
    tokenizer: Path | None = None,
    *,
    writes: bool = True,
) -> None:
    """Write the adapters of a model as a folder for `PeftModel.from_pretrained`.

    An existing folder of that name is removed just before. Collective over the ranks that read
    `weights` together.

    Args:
        folder: The folder to write.
        weights: The adapters.
        described: Result of `distmp.models.adapters.describe`.
        tokenizer: Folder whose tokenizer is copied.
        writes: Whether this rank writes the files.

    Raises:
        CheckpointError: If they cannot be written, on the rank that writes them.
    """

    def write_rest(temporary: Path) -> None:
        (temporary / _CONFIG).write_text(json.dumps(described["config"], indent=2) + "\n")
        tokenizer_files.copy(tokenizer, temporary)

    write_folder(folder, weights, {_WEIGHTS: [*weights.specs]}, write_rest, writes=writes)
