"""Writes the weights of a running engine tensor by tensor, or gathers trained ones on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distmp.engine import Engine
from distmp.errors import CheckpointError, DistmpError
from distmp.export.files import MAX_SHARD_SIZE, write
from distmp.export.sources import EngineWeights
from distmp.models import huggingface
from distmp.models.architecture import TRANSFORMER
from distmp.models.transformer import Transformer


def save_weights(
    engine: Engine,
    folder: str | Path,
    state: Mapping[str, Tensor] | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write the FP32 weights of an engine as safetensors; every rank has to call it.

    All ranks gather one tensor at a time, and rank 0 writes it. The folder has the format of
    `distmp export`; an existing one is replaced.

    Args:
        engine: The engine.
        folder: The folder to write.
        state: Tensors to write in place of `engine.state_dict()`, with its names and shards, such
            as an average of the weights.
        max_shard_size: Maximum size of one file, in bytes.

    Raises:
        CheckpointError: On all ranks, if the folder cannot be written.
    """
    ranks, writes = engine.world.ranks, engine.world.rank == 0
    weights = EngineWeights(engine.state_dict() if state is None else state, keep=writes)
    problem = None
    try:
        write(
            Path(folder),
            weights,
            _description(engine.model),
            torch.float32,
            max_shard_size,
            writes=writes,
        )
    except DistmpError as error:
        problem = str(error)
    if problems := [found for found in ranks.gather(problem) if found is not None]:
        raise CheckpointError(problems[0])


def trained_weights(engine: Engine) -> dict[str, Tensor]:
    """Gather the trained parameters on rank 0, such as adapters; every rank has to call it.

    Parameters are gathered one by one.

    Args:
        engine: The engine.

    Returns:
        On rank 0 the full FP32 values on the CPU, by their names in the model; on other ranks
        nothing.
    """
    trained = engine.updated_by_optimizer()
    state = {name: tensor for name, tensor in engine.state_dict().items() if name in trained}
    weights = EngineWeights(state, keep=engine.world.rank == 0)
    return {
        name: value.clone()  # not the memory that the next step writes to
        for wanted in weights.specs
        for name, value in weights.read([wanted]).items()
    }


def _description(model: nn.Module) -> dict[str, Any] | None:
    """Return the content of config.json for models that have one."""
    if isinstance(model, Transformer):
        return {"model_type": TRANSFORMER, **asdict(model.config)}
    if any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return huggingface.configuration(model)
    return None
