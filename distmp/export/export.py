"""Exports weights: a directory of safetensors, from a checkpoint of any strategy.

    distmp export runs/default --to weights

The weights are those that the optimizer updates, in FP32 unless the run had no master weights. They
load in plain torch (`safetensors.torch.load_file`, `model.load_state_dict`), as the start of a run
(`model.weights`), and, for models of transformers, in transformers (`from_pretrained`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmp.checkpoint import recovery
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.errors import CheckpointError, nearest, require
from distmp.export.files import write, write_directory
from distmp.export.weights import PREFIX
from distmp.models import huggingface_files
from distmp.models.adapters import exported_name, is_adapter
from distmp.precision.policy import DTYPE_WORDS
from distmp.utils.dtypes import dtype_name
from distmp.utils.files import check_directory_name

logger = logging.getLogger("distmp")

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Where the callback `Ema` of a run saves the average of each trained weight.
AVERAGE_PREFIX = "callbacks/Ema/"


@dataclass
class CheckpointWeights:
    """The weights and buffers in a checkpoint, under their names in the model.

    Args:
        checkpoint: A checkpoint of any strategy and world size.
        dtype: Dtype of all floating-point tensors of up to 32 bits; others keep theirs.
        ema: Whether trained weights are those of the average (setting `ema`).
        adapters: Select the parameters of adapters, under their names in peft's files.

    Attributes:
        specs: Shape and dtype of each tensor, as tensors on the meta device.
    """

    checkpoint: StoredCheckpoint
    dtype: torch.dtype
    ema: bool = False
    adapters: bool = False

    is_collective = False

    def __post_init__(self) -> None:
        # The name in the checkpoint of each tensor.
        self._stored = _names_below(PREFIX, self.checkpoint)
        if self.ema:
            self._stored |= _names_below(AVERAGE_PREFIX, self.checkpoint)
        if self.adapters:
            own = filter(is_adapter, self._stored)
            self._stored = {exported_name(name): self._stored[name] for name in own}
        self.specs = {}
        for name, stored_name in self._stored.items():
            shape, stored = self.checkpoint.tensors[stored_name]
            is_converted = stored.is_floating_point and stored.itemsize <= 4
            kept = self.dtype if is_converted else stored
            self.specs[name] = torch.empty(shape, dtype=kept, device="meta")

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU.

        Raises:
            CheckpointError: If it cannot be read, or a finite weight is infinite in the dtype.
        """
        tensor = torch.empty_like(self.specs[name], device="cpu")
        self.checkpoint.load({self._stored[name]: tensor})
        if self._is_beyond_range(name, tensor):
            raise CheckpointError(
                f"{name!r} of {self.checkpoint} has values beyond the range of "
                f"{dtype_name(self.dtype)}; use bf16 (up to 3.38e38) or fp32"
            )
        return tensor

    def _is_beyond_range(self, name: str, tensor: Tensor) -> bool:
        """Return whether a finite value is infinite in the dtype; masks are infinite on purpose."""
        if self.dtype == torch.float32 or not tensor.isinf().any():
            return False
        stored = torch.empty(tensor.shape, dtype=self.checkpoint.tensors[self._stored[name]][1])
        self.checkpoint.load({self._stored[name]: stored})
        return bool((stored.isfinite() & tensor.isinf()).any())


def write_adapter(
    directory: Path,
    weights: CheckpointWeights,
    described: Mapping[str, Any],
    tokenizer: Path | None = None,
) -> None:
    """Write the adapters of a model as a directory for `PeftModel.from_pretrained`.

    Args:
        directory: The directory to write.
        weights: The adapters.
        described: Result of `distmp.models.adapters.describe`.
        tokenizer: Directory whose tokenizer is copied.

    Raises:
        CheckpointError: If they cannot be written.
    """

    def write_rest(temporary: Path) -> None:
        (temporary / _CONFIG).write_text(json.dumps(described, indent=2) + "\n")
        huggingface_files.copy(tokenizer, temporary)

    write_directory(directory, weights, {_WEIGHTS: [*weights.specs]}, write_rest, writes=True)


def export(
    source: str | Path,
    directory: str | Path,
    dtype: str = "fp32",
    *,
    ema: bool = False,
) -> StoredCheckpoint:
    """Write the weights in a checkpoint as safetensors, in one process and tensor by tensor.

    Takes the memory of one tensor.

    Args:
        source: A checkpoint, a run's directory, or a directory of checkpoints, of which the newest
            healthy one is used.
        directory: A new directory, or an empty one.
        dtype: "fp32", "bf16" or "fp16": dtype of all floating-point tensors of up to 32 bits.
        ema: Export the average of the weights (setting `ema`). Frozen weights and buffers have no
            average and are those of the model.

    The adapters of a run with `model.peft` are written alone, in peft's format.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: If there is no checkpoint or no average in it, the directory is not empty or
            named like a file, or `dtype` is invalid.
        CheckpointError: If the checkpoint cannot be read, or a weight is out of range of `dtype`.

    Example:
        >>> import torch, distmp
        >>> from distmp.export.export import export
        >>> engine = distmp.Engine(
        ...     torch.nn.Linear(8, 4),
        ...     lambda module, batch: (module(batch).square().sum(), len(batch)),
        ...     lambda named: torch.optim.AdamW(named, fused=True),
        ...     policy="fp32",
        ... )
        >>> saved = engine.save("checkpoints")
        >>> export("checkpoints", "exported", "bf16").path.name
        'step-000000'
    """
    require(dtype in DTYPE_WORDS, "--dtype", dtype, nearest(dtype, DTYPE_WORDS))
    check_directory_name("--to", directory)
    target = Path(directory)
    is_new = not os.path.exists(target) or (target.is_dir() and not any(target.iterdir()))
    require(is_new, "--to", str(directory), "exists already; name a new directory")
    checkpoint = recovery.resolve(str(source), Path(), setting="checkpoint")
    assert checkpoint is not None  # without `missing_ok`
    valid = not ema or bool(_names_below(AVERAGE_PREFIX, checkpoint))
    problem = "contains no average of the weights; train with ema.decay"
    require(valid, "--ema", str(checkpoint), problem)
    tokenizer = _tokenizer(checkpoint)
    adapter = checkpoint.state.numbers.get("adapter")
    weights = CheckpointWeights(
        checkpoint, DTYPE_WORDS[dtype], ema=ema, adapters=adapter is not None
    )
    if adapter is not None:
        write_adapter(target, weights, adapter, tokenizer)
    else:
        described = checkpoint.state.numbers.get("model")
        if described is None:
            logger.warning("no config.json is written: %s does not describe its model", checkpoint)
        write(target, weights, described, DTYPE_WORDS[dtype], tokenizer=tokenizer)
    return checkpoint


def _tokenizer(checkpoint: StoredCheckpoint) -> Path | None:
    """Return the directory of the tokenizer of a run, if it exists; log if there is none."""
    known = checkpoint.state.numbers.get("tokenizer")
    if known is not None and huggingface_files.has_tokenizer(Path(known)):
        return Path(known)
    if known is not None:
        logger.warning("no tokenizer is exported: %s has no readable files of one", known)
    return None


def _names_below(prefix: str, checkpoint: StoredCheckpoint) -> dict[str, str]:
    """Return the names in a checkpoint that begin with a prefix, by the rest of the name."""
    names = (name for name in checkpoint.tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): name for name in names}
