"""Writes the weights of a running engine tensor by tensor, or gathers trained ones on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from distmp.distributed.world import World
from distmp.errors import CheckpointError, listed, require
from distmp.export.files import MAX_SHARD_SIZE, write
from distmp.export.weights import PREFIX
from distmp.models.architecture import described
from distmp.utils.files import check_directory_name
from distmp.utils.flat_shard import gathered, global_shape
from distmp.utils.tensor_trees import under


class RunningEngine(Protocol):
    """The part of `distmp.Engine` that an export reads."""

    @property
    def world(self) -> World:
        """The ranks."""

    @property
    def model(self) -> nn.Module:
        """The model."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live tensors by name, FP32 weights among them."""

    def updated_by_optimizer(self) -> set[str]:
        """Return the names of the tensors that only an update of the optimizer changes."""


class EngineWeights:
    """The weights and buffers of a running engine; all ranks together read each tensor.

    Args:
        state: Result of `Engine.state_dict`.
        keep: Whether `read` returns them on this rank.

    Attributes:
        specs: Shape and dtype of each tensor, as tensors on the meta device.
    """

    is_collective = True

    def __init__(self, state: Mapping[str, Tensor], *, keep: bool) -> None:
        self._keep = keep
        self._state = under(PREFIX, state)
        self.specs = {
            name: torch.empty(global_shape(tensor), dtype=tensor.dtype, device="meta")
            for name, tensor in self._state.items()
        }

    def read(self, name: str) -> Tensor | None:
        """Gather a tensor; return it on the CPU if this rank keeps it, else None."""
        full = gathered(self._state[name])
        # Not the memory that the next step writes to.
        return full.detach().to("cpu", copy=True) if self._keep else None


def save_weights(
    engine: RunningEngine,
    directory: str | Path,
    state: Mapping[str, Tensor] | None = None,
    max_shard_size: int | None = None,
) -> None:
    """Write the FP32 weights of an engine as safetensors; see `Engine.export`."""
    check_directory_name("directory", directory)
    size = MAX_SHARD_SIZE if max_shard_size is None else max_shard_size
    valid = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    problem = "use a positive number of bytes, such as 500 * 10**6"
    require(valid, "max_shard_size", size, problem)
    writes = engine.world.rank == 0
    weights = EngineWeights(_checked(state, engine.state_dict()), keep=writes)
    architecture = described(engine.model)
    # Collective, and a rank that fails still takes part in all reads.
    engine.world.ranks.all_or_none(
        lambda: write(Path(directory), weights, architecture, torch.float32, size, writes=writes),
        error=lambda failures, _: CheckpointError(min(failures.items())[1].message),
    )


def _checked(state: Mapping[str, Tensor] | None, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the state to write; None selects the state of the engine.

    Raises:
        ConfigError: If it lacks a weight of the engine, or has an unknown one, or another shape.
    """
    if state is None:
        return own
    weights, given = (
        {f"{name} {[*global_shape(s[name])]}" for name in s if name.startswith(PREFIX)}
        for s in (own, state)
    )
    for problem, names in (("lacks", weights - given), ("has the unknown", given - weights)):
        problem = (
            f"{problem} {listed(sorted(names))}; pass engine.state_dict() | "
            "{'model/NAME': tensor, ...}, with the names and shapes of the engine's weights"
        )
        require(not names, "state", f"{len(state)} tensors", problem)
    return state


def trained_weights(engine: RunningEngine) -> dict[str, Tensor]:
    """Gather the trained parameters on rank 0, such as adapters; every rank has to call it.

    Parameters are gathered one by one.

    Args:
        engine: The engine.

    Returns:
        On rank 0 the full FP32 values on the CPU, by their names in the model; on other ranks
        nothing.

    Example:
        >>> import torch, distmp
        >>> from distmp.export.running import trained_weights
        >>> engine = distmp.Engine(
        ...     torch.nn.Linear(8, 4),
        ...     lambda module, batch: (module(batch).square().sum(), len(batch)),
        ...     lambda named: torch.optim.AdamW(named, fused=True),
        ...     policy="bf16",
        ... )
        >>> {name: value.dtype for name, value in trained_weights(engine).items()}
        {'weight': torch.float32, 'bias': torch.float32}
    """
    trained = engine.updated_by_optimizer()
    state = {name: tensor for name, tensor in engine.state_dict().items() if name in trained}
    weights = EngineWeights(state, keep=engine.world.rank == 0)
    values = ((name, weights.read(name)) for name in weights.specs)
    return {name: value for name, value in values if value is not None}
