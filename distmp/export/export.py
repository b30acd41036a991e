"""Exports weights: a folder of safetensors, from a checkpoint of any strategy.

    distmp export runs/default --to weights

The weights are those that the optimizer updates, in FP32 unless the run had no master weights. They
load in plain torch (`safetensors.torch.load_file`, `model.load_state_dict`), as the start of a run
(`model.weights`), and, for models of transformers, in transformers (`from_pretrained`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from distmp.checkpoint import store
from distmp.errors import ConfigError, nearest
from distmp.export.files import MAX_SHARD_SIZE, Weights, write
from distmp.export.sources import CheckpointWeights, LlamaWeights
from distmp.models import llama
from distmp.models.architecture import TRANSFORMER, is_hugging_face
from distmp.models.transformer import TransformerConfig
from distmp.precision.policy import DTYPE_WORDS
from distmp.utils.dtypes import dtype_name

Layout = Literal["own", "transformers"]


def export(
    source: str | Path,
    folder: str | Path,
    dtype: str = "fp32",
    max_shard_size: int = MAX_SHARD_SIZE,
    layout: Layout = "own",
) -> int:
    """Write the weights in a checkpoint as safetensors, in one process and tensor by tensor.

    Takes the memory of one tensor.

    Args:
        source: A checkpoint, a run's folder, or a folder of checkpoints, of which the newest
            undamaged one is used.
        folder: A new folder, or an empty one.
        dtype: "fp32", "bf16" or "fp16": dtype of all floating-point tensors of up to 32 bits.
        max_shard_size: Maximum size of one file, in bytes. Larger models are divided into several
            files, with an index.
        layout: "own": the names of the model's `state_dict`. "transformers": names and config.json
            of transformers' Llama or Qwen3, for distmp's transformer; a Hugging Face model keeps
            its names.

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
    described = checkpoint.numbers.get("model")
    written: Weights = weights
    if layout == "transformers":
        described, written = _as_llama(described, weights, DTYPE_WORDS[dtype])
    write(target, written, described, DTYPE_WORDS[dtype], max_shard_size)
    weights.report_nan()
    return sum(tensor.numel() for tensor in weights.specs.values())


def _as_llama(
    described: Any, weights: CheckpointWeights, dtype: torch.dtype
) -> tuple[dict[str, Any], Weights]:
    if described is not None and is_hugging_face(described):
        return described, weights
    if described is None or described.get("model_type") != TRANSFORMER:
        raise ConfigError(
            "--format", "transformers", "only distmp's transformer has this format; omit the option"
        )
    values = {key: value for key, value in described.items() if key != "model_type"}
    config = TransformerConfig(**values)
    return llama.describe(config, dtype_name(dtype)), LlamaWeights(weights, config)


def _find(source: str | Path) -> store.StoredCheckpoint:
    """Return the checkpoint that `source` refers to, verified."""
    checkpoint = store.resolve(str(source), Path(), setting="checkpoint")
    assert checkpoint is not None  # only "auto" can return None
    return checkpoint
