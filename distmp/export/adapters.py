"""Exports adapters as a folder of peft."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from distmp.export.files import Weights, write_folder
from distmp.models import tokenizer_files
from distmp.models.adapters import exported_name, is_adapter

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
