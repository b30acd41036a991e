"""Weights for others: a folder of safetensors, from a checkpoint of any strategy.

    distmp export runs/default --to weights

The weights are those that the optimizer steps, FP32 unless the run had no master weights. A folder
loads in plain torch (`safetensors.torch.load_file`, `model.load_state_dict`), as the start of a run
(`model.weights`), and, where the model is theirs, in transformers (`from_pretrained`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmp.checkpoint import store
from distmp.checkpoint.location import locate
from distmp.errors import CheckpointError, ConfigError, nearest
from distmp.models import huggingface
from distmp.models.architecture import CONFIG_FILE, is_hugging_face
from distmp.precision.policy import DTYPE_WORDS
from distmp.utils.flat_shard import gathered

PREFIX = "model/"
# What readers of safetensors expect: larger models are several files and an index.
LARGEST_FILE = 5 * 10**9


def export(
    source: str | Path,
    folder: str | Path,
    dtype: str = "fp32",
    largest_file: int = LARGEST_FILE,
) -> int:
    """Write the weights in a checkpoint as safetensors; no other process is needed.

    Takes the memory of one copy of the weights, in the type that is asked for.

    Args:
        source: A checkpoint, a run's folder, or a folder of checkpoints (the latest is taken).
        folder: A new folder, or an empty one.
        dtype: "fp32", "bf16" or "fp16": type of all floating-point tensors of up to 32 bits.
        largest_file: Bytes; more are divided into several files, with an index.

    Returns:
        How many numbers were written.

    Raises:
        ConfigError: If there is no checkpoint, the folder is not empty, or there is no such type.
        CheckpointError: If the checkpoint cannot be read, or a weight does not fit into the type.
    """
    if dtype not in DTYPE_WORDS:
        raise ConfigError("--dtype", dtype, nearest(dtype, DTYPE_WORDS))
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("--to", str(folder), "is there already; name a new folder")
    checkpoint = _find(source)
    weights = read(checkpoint, DTYPE_WORDS[dtype])
    size = sum(tensor.numel() for tensor in weights.values())
    architecture = checkpoint.numbers.get("model")
    write(target, weights, architecture, DTYPE_WORDS[dtype], largest_file)
    return size


def read(checkpoint: store.StoredCheckpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights and buffers in a checkpoint, on the CPU, under their names in the model.

    Args:
        checkpoint: Written by any strategy at any world size, and compared with its checksums.
        dtype: Of all floating-point tensors of up to 32 bits.

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
    if dtype == torch.float16:
        _refuse_infinite(checkpoint, weights)
    return weights


def live_weights(state: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return the weights and buffers of a running engine; every rank has to call it.

    Args:
        state: What `Engine.state_dict` returns; shards are gathered one by one.
        keep: Whether this rank wants them, copied to the CPU; the others get nothing.
    """
    weights = {}
    for name, tensor in state.items():
        if name.startswith(PREFIX):
            whole = gathered(tensor)
            if keep:
                weights[name.removeprefix(PREFIX)] = whole.detach().to("cpu", copy=True)
    return weights


def write(
    folder: Path,
    weights: dict[str, Tensor],
    architecture: Mapping[str, Any] | None,
    dtype: torch.dtype,
    largest_file: int = LARGEST_FILE,
) -> None:
    """Write a folder of safetensors, which appears whole; one that is there is replaced.

    Args:
        folder: What to write.
        weights: On the CPU, by name; a tied weight once.
        architecture: What config.json is to say, see `distmp.models.architecture`; None: no such
            file.
        dtype: What config.json calls the type of the weights.
        largest_file: Bytes of one file.

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
    # Comes with accelerate; imported where it is used, like everything that few runs need.
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder, max_shard_size=largest_file)
    if architecture is not None:
        (folder / CONFIG_FILE).write_text(json.dumps(architecture, indent=2) + "\n")


def _make_readable(folder: Path) -> None:
    """Give files the permissions of new ones: safetensors makes them for their owner alone."""
    files = list(folder.iterdir())
    new = folder / "new"
    new.touch()
    for file in files:
        shutil.copymode(new, file)
    new.unlink()


def _find(source: str | Path) -> store.StoredCheckpoint:
    """Return the checkpoint that is meant, compared with its checksums."""
    place = locate("checkpoint", str(source))
    if (place / "checkpoints").is_dir():
        place = place / "checkpoints"
    found = store.resolve(str(place), place, setting="checkpoint")
    assert found is not None  # only "auto" may find none
    return found


def _is_converted(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize <= 4


def _refuse_infinite(checkpoint: store.StoredCheckpoint, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.isinf().any():
            raise CheckpointError(
                f"{name!r} of {checkpoint} has values beyond the range of float16; use bf16 or fp32"
            )
