"""Exports weights: a folder of safetensors, from a checkpoint of any strategy.

    distmp export runs/default --to weights

The weights are those that the optimizer updates, in FP32 unless the run had no master weights. They
load in plain torch (`safetensors.torch.load_file`, `model.load_state_dict`), as the start of a run
(`model.weights`), and, for models of transformers, in transformers (`from_pretrained`).
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmp.checkpoint import store
from distmp.checkpoint.finite import is_finite
from distmp.checkpoint.location import locate
from distmp.errors import CheckpointError, ConfigError, listed, nearest
from distmp.models import huggingface
from distmp.models.architecture import CONFIG_FILE, is_hugging_face
from distmp.precision.policy import DTYPE_WORDS
from distmp.utils.flat_shard import gathered

logger = logging.getLogger("distmp")

PREFIX = "model/"
# The usual limit for safetensors: larger models are several files with an index.
LARGEST_FILE = 5 * 10**9


def export(
    source: str | Path,
    folder: str | Path,
    dtype: str = "fp32",
    largest_file: int = LARGEST_FILE,
) -> int:
    """Write the weights in a checkpoint as safetensors, in one process.

    Takes the memory of one copy of the weights in `dtype`.

    Args:
        source: A checkpoint, a run's folder, or a folder of checkpoints, of which the newest
            undamaged one is used.
        folder: A new folder, or an empty one.
        dtype: "fp32", "bf16" or "fp16": dtype of all floating-point tensors of up to 32 bits.
        largest_file: Maximum size of one file, in bytes. Larger models are divided into several
            files, with an index.

    Returns:
        Number of exported elements.

    Raises:
        ConfigError: If there is no checkpoint, the folder is not empty, or `dtype` is unknown.
        CheckpointError: If the checkpoint cannot be read, or a weight is out of range of `dtype`.
    """
    if dtype not in DTYPE_WORDS:
        raise ConfigError("--dtype", dtype, nearest(dtype, DTYPE_WORDS))
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("--to", str(folder), "exists already; name a new folder")
    checkpoint = _find(source)
    weights = read(checkpoint, DTYPE_WORDS[dtype])
    size = sum(tensor.numel() for tensor in weights.values())
    architecture = checkpoint.numbers.get("model")
    write(target, weights, architecture, DTYPE_WORDS[dtype], largest_file)
    return size


def read(checkpoint: store.StoredCheckpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights and buffers in a checkpoint, on the CPU, under their names in the model.

    Args:
        checkpoint: A checkpoint of any strategy and world size.
        dtype: Dtype of all floating-point tensors of up to 32 bits; others keep theirs.

    Raises:
        CheckpointError: If it cannot be read, or a finite weight is infinite in `dtype`.
    """
    live = {
        name: torch.empty(shape, dtype=dtype if _is_converted(stored) else stored)
        for name, (shape, stored) in checkpoint.tensors.items()
        if name.startswith(PREFIX)
    }
    checkpoint.load(live)
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in live.items()}
    _report_nan(checkpoint, weights)
    if dtype == torch.float16:
        _refuse_infinite(checkpoint, weights)
    return weights


def live_weights(state: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return the weights and buffers of a running engine. Collective over all ranks.

    Args:
        state: Result of `Engine.state_dict`; shards are gathered one by one.
        keep: Whether this rank returns them, copied to the CPU; otherwise the result is empty.
    """
    weights = {}
    for name, tensor in state.items():
        if name.startswith(PREFIX):
            full = gathered(tensor)
            if keep:
                weights[name.removeprefix(PREFIX)] = full.detach().to("cpu", copy=True)
    return weights


def write(
    folder: Path,
    weights: dict[str, Tensor],
    architecture: Mapping[str, Any] | None,
    dtype: torch.dtype,
    largest_file: int = LARGEST_FILE,
) -> None:
    """Write a folder of safetensors atomically; an existing one is replaced.

    Args:
        folder: The folder to write.
        weights: Tensors by name, on the CPU; a tied weight once.
        architecture: Content of config.json, see `distmp.models.architecture`; None: no such file.
        dtype: Dtype of the weights, for config.json.
        largest_file: Maximum size of one file, in bytes.

    Raises:
        CheckpointError: If it cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if architecture is not None and is_hugging_face(architecture):
            huggingface.write(temporary, weights, architecture, dtype, largest_file)
        else:
            _write_plain(temporary, weights, architecture, largest_file)
        _make_readable(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_plain(
    folder: Path,
    weights: dict[str, Tensor],
    architecture: Mapping[str, Any] | None,
    largest_file: int,
) -> None:
    # A dependency of accelerate; imported here because most runs do not need it.
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder, max_shard_size=largest_file)
    if architecture is not None:
        (folder / CONFIG_FILE).write_text(json.dumps(architecture, indent=2) + "\n")


def _make_readable(folder: Path) -> None:
    """Give files default permissions: safetensors makes them readable only for their owner."""
    files = list(folder.iterdir())
    new = folder / "new"
    new.touch()
    for file in files:
        shutil.copymode(new, file)
    new.unlink()


def _find(source: str | Path) -> store.StoredCheckpoint:
    """Return the checkpoint that `source` refers to, verified."""
    location = locate("checkpoint", str(source))
    if (location / "checkpoints").is_dir():
        location = location / "checkpoints"
    checkpoint = store.resolve(str(location), location, setting="checkpoint")
    assert checkpoint is not None  # only "auto" can return None
    return checkpoint


def _is_converted(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize <= 4


def _report_nan(checkpoint: store.StoredCheckpoint, weights: Mapping[str, Tensor]) -> None:
    # Buffers may hold infinite values on purpose, such as a mask.
    broken = [
        name
        for name, tensor in weights.items()
        if not is_finite(tensor) and bool(tensor.isnan().any())
    ]
    if broken:
        logger.warning("%s holds NaN in %s: so do the exported weights", checkpoint, listed(broken))


def _refuse_infinite(checkpoint: store.StoredCheckpoint, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.isinf().any():
            raise CheckpointError(
                f"{name!r} of {checkpoint} has values beyond the range of float16; use bf16 or fp32"
            )
