"""Exports weights: a folder of safetensors, from a checkpoint of any strategy.

    distmp export runs/default --to weights

The weights are those that the optimizer updates, in FP32 unless the run had no master weights. They
load in plain torch (`safetensors.torch.load_file`, `model.load_state_dict`), as the start of a run
(`model.weights`), and, for models of transformers, in transformers (`from_pretrained`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch

from distmp.checkpoint import store
from distmp.checkpoint.layout import final_path, has_checkpoint
from distmp.checkpoint.manifest import check_number
from distmp.errors import ConfigError, nearest
from distmp.export.adapters import AdapterWeights, MergedWeights, updates_of, write_adapter
from distmp.export.files import MAX_SHARD_SIZE, Weights, check_shard_size, write
from distmp.export.sources import CheckpointWeights, LlamaWeights, has_average
from distmp.export.weights import PREFIX
from distmp.models import llama
from distmp.models.architecture import TRANSFORMER, is_hugging_face
from distmp.models.tokenizer_files import has_tokenizer
from distmp.models.transformer import TransformerConfig
from distmp.precision.policy import DTYPE_WORDS, SIXTEEN_BIT
from distmp.utils.dtypes import dtype_name
from distmp.utils.files import check_folder_name

logger = logging.getLogger("distmp")

Layout = Literal["own", "transformers"]


def export(
    source: str | Path,
    folder: str | Path,
    dtype: str = "fp32",
    max_shard_size: int = MAX_SHARD_SIZE,
    layout: Layout = "own",
    *,
    ema: bool = False,
    best: bool = False,
    merge: bool = False,
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
        ema: Export the average of the weights (setting `ema`). Frozen weights and buffers have no
            average and are those of the model.
        best: Export the checkpoint with the best validation; the run needs early stopping.
        merge: Merge the adapters of `model.peft` into the weights. Otherwise, the adapters of such
            a run are written alone, in peft's format.

    Returns:
        Number of exported elements.

    Raises:
        ConfigError: If there is no checkpoint, no best one or no average in it, the folder is not
            empty or named like a file, or `dtype` or `max_shard_size` is invalid.
        CheckpointError: If the checkpoint cannot be read, or a weight is out of range of `dtype`.
    """
    if dtype not in DTYPE_WORDS:
        raise ConfigError("--dtype", dtype, nearest(dtype, DTYPE_WORDS))
    check_folder_name("--to", folder)
    check_shard_size("--max-shard-size", max_shard_size)
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("--to", str(folder), "exists already; name a new folder")
    checkpoint = _find(source)
    if best:
        checkpoint = _best(checkpoint)
    _check_average(checkpoint, ema=ema)
    adapter = checkpoint.numbers.get("adapter")
    if merge and adapter is None:
        raise ConfigError("--merge", True, f"{checkpoint} has no adapters; omit the option")
    if adapter is not None and not merge and layout == "transformers":
        raise ConfigError("--format", layout, "adapters have names of their own; add --merge")
    if merge:
        _warn_about_rounded_base(checkpoint, DTYPE_WORDS[dtype])
    # What is merged is read in FP32, and rounded once.
    read = CheckpointWeights(checkpoint, torch.float32 if merge else DTYPE_WORDS[dtype], ema=ema)
    tokenizer = _tokenizer(checkpoint)
    if adapter is not None and not merge:
        own = AdapterWeights(read)
        write_adapter(target, own, adapter, tokenizer)
        written: Weights = own
    else:
        written = MergedWeights(read, updates_of(adapter), DTYPE_WORDS[dtype]) if adapter else read
        described = checkpoint.numbers.get("model")
        if layout == "transformers":
            described, written = _as_llama(described, written, DTYPE_WORDS[dtype])
        write(target, written, described, DTYPE_WORDS[dtype], max_shard_size, tokenizer=tokenizer)
    read.report_nan()
    return sum(tensor.numel() for tensor in written.specs.values())


def _warn_about_rounded_base(checkpoint: store.StoredCheckpoint, dtype: torch.dtype) -> None:
    """Log if frozen weights were rounded before the export, to another dtype than its own."""
    held = {
        stored
        for name, (_, stored) in checkpoint.tensors.items()
        if name.startswith(PREFIX) and stored in SIXTEEN_BIT
    }
    for rounded in held - {dtype}:
        logger.warning(
            "%s: the run held its frozen weights in %s, so the merged ones are exact to that only; "
            "for more, export without --merge, and merge the adapters into the FP32 weights by "
            "peft's merge_and_unload",
            checkpoint,
            dtype_name(rounded),
        )


def _tokenizer(checkpoint: store.StoredCheckpoint) -> Path | None:
    """Return the folder of the tokenizer of a run, if it exists; log if there is none."""
    known = checkpoint.numbers.get("tokenizer")
    if known is not None and has_tokenizer(Path(known)):
        return Path(known)
    if known is not None:
        logger.warning("no tokenizer is exported: %s has no files of one any more", known)
    return None


def _as_llama(
    described: Any, weights: Weights, dtype: torch.dtype
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


def _best(checkpoint: store.StoredCheckpoint) -> store.StoredCheckpoint:
    """Return the best checkpoint of the run that wrote `checkpoint`, verified."""
    states = checkpoint.numbers.get("callbacks", {})
    stopping = states.get("EarlyStopping", {}) if isinstance(states, dict) else {}
    step = stopping.get("best_step")
    if not step:
        raise ConfigError(
            "--best", str(checkpoint), "has no best validation; train with early_stopping.patience"
        )
    path = final_path(checkpoint.path.parent, check_number("its best step", step))
    if not has_checkpoint(path.parent, step):
        raise ConfigError(
            "--best",
            str(checkpoint),
            f"its best checkpoint, of step {step}, is not in {path.parent}: export the one of the "
            "run that this run continues",
        )
    found = store.resolve(str(path), path.parent, setting="--best")
    assert found is not None
    return found


def _check_average(checkpoint: store.StoredCheckpoint, *, ema: bool) -> None:
    if ema and not has_average(checkpoint):
        raise ConfigError(
            "--ema", str(checkpoint), "contains no average of the weights; train with ema.decay"
        )
    if not ema and has_average(checkpoint):
        logger.warning(
            "%s also contains an average of the weights, which --ema exports in their place",
            checkpoint,
        )


def _find(source: str | Path) -> store.StoredCheckpoint:
    """Return the checkpoint that `source` refers to, verified."""
    checkpoint = store.resolve(str(source), Path(), setting="checkpoint")
    assert checkpoint is not None  # only "auto" can return None
    return checkpoint
