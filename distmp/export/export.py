"""Exports weights: a folder of safetensors, from a checkpoint of any strategy.

    distmp export runs/default --to weights

The weights are those that the optimizer updates, in FP32 unless the run had no master weights. They
load in plain torch (`safetensors.torch.load_file`, `model.load_state_dict`), as the start of a run
(`model.weights`), and, for models of transformers, in transformers (`from_pretrained`).
"""

from __future__ import annotations

from pathlib import Path

from distmp.checkpoint import store
from distmp.checkpoint.location import locate
from distmp.errors import ConfigError, nearest
from distmp.export.files import MAX_SHARD_SIZE, write
from distmp.export.sources import CheckpointWeights
from distmp.precision.policy import DTYPE_WORDS


def export(
    source: str | Path,
    folder: str | Path,
    dtype: str = "fp32",
    max_shard_size: int = MAX_SHARD_SIZE,
) -> int:
    """Write the weights in a checkpoint as safetensors, in one process and file by file.

    Takes the memory of one file.

    Args:
        source: A checkpoint, a run's folder, or a folder of checkpoints, of which the newest
            undamaged one is used.
        folder: A new folder, or an empty one.
        dtype: "fp32", "bf16" or "fp16": dtype of all floating-point tensors of up to 32 bits.
        max_shard_size: Maximum size of one file, in bytes. Larger models are divided into several
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
    weights = CheckpointWeights(checkpoint, DTYPE_WORDS[dtype])
    write(target, weights, checkpoint.numbers.get("model"), DTYPE_WORDS[dtype], max_shard_size)
    weights.report_nan()
    return sum(tensor.numel() for tensor in weights.specs.values())


def _find(source: str | Path) -> store.StoredCheckpoint:
    """Return the checkpoint that `source` refers to, verified."""
    location = locate("checkpoint", str(source))
    if (location / "checkpoints").is_dir():
        location = location / "checkpoints"
    checkpoint = store.resolve(str(location), location, setting="checkpoint")
    assert checkpoint is not None  # only "auto" can return None
    return checkpoint
