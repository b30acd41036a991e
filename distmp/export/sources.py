"""The weights of a checkpoint or of a running engine, read a few tensors at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from distmp.checkpoint import store
from distmp.errors import CheckpointError
from distmp.export.weights import PREFIX
from distmp.utils.flat_shard import gathered, global_shape

# Where the callback `Ema` of a run saves the average of each trained weight.
AVERAGE_PREFIX = "callbacks/Ema/"


class CheckpointWeights:
    """The weights and buffers in a checkpoint, under their names in the model.

    Args:
        checkpoint: A checkpoint of any strategy and world size.
        dtype: Dtype of all floating-point tensors of up to 32 bits; others keep theirs.
        ema: Whether trained weights are those of the average (setting `ema`).

    Attributes:
        specs: Shape and dtype of each tensor, as tensors on the meta device.
    """

    def __init__(
        self, checkpoint: store.StoredCheckpoint, dtype: torch.dtype, *, ema: bool = False
    ) -> None:
        # The name in the checkpoint of each tensor.
        self._stored = _names_below(PREFIX, checkpoint)
        if ema:
            self._stored |= _names_below(AVERAGE_PREFIX, checkpoint)
        self.specs = {}
        for name, stored_name in self._stored.items():
            shape, stored = checkpoint.tensors[stored_name]
            is_converted = stored.is_floating_point and stored.itemsize <= 4
            kept = dtype if is_converted else stored
            self.specs[name] = torch.empty(shape, dtype=kept, device="meta")
        self._checkpoint = checkpoint
        self._dtype = dtype

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors on the CPU.

        Raises:
            CheckpointError: If they cannot be read, or a finite weight is infinite in the dtype.
        """
        tensors = {name: torch.empty_like(self.specs[name], device="cpu") for name in names}
        self._checkpoint.load({self._stored[name]: tensor for name, tensor in tensors.items()})
        if self._dtype == torch.float16:
            refuse_infinite(tensors, str(self._checkpoint))
        return tensors


class EngineWeights:
    """The weights and buffers of a running engine; all ranks together read each tensor.

    Args:
        state: Result of `Engine.state_dict`.
        keep: Whether `read` returns them on this rank.

    Attributes:
        specs: Shape and dtype of each tensor, as tensors on the meta device.
    """

    def __init__(self, state: Mapping[str, Tensor], *, keep: bool) -> None:
        self._keep = keep
        self._state = {
            name.removeprefix(PREFIX): tensor
            for name, tensor in state.items()
            if name.startswith(PREFIX)
        }
        self.specs = {
            name: torch.empty(global_shape(tensor), dtype=tensor.dtype, device="meta")
            for name, tensor in self._state.items()
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Gather tensors; return them on the CPU if this rank keeps them, else nothing."""
        tensors = {}
        for name in names:
            full = gathered(self._state[name])
            if self._keep:
                tensors[name] = full.detach().to("cpu")
        return tensors


def has_average(checkpoint: store.StoredCheckpoint) -> bool:
    """Return whether a checkpoint contains an average of the weights."""
    return bool(_names_below(AVERAGE_PREFIX, checkpoint))


def _names_below(prefix: str, checkpoint: store.StoredCheckpoint) -> dict[str, str]:
    """Return the names in a checkpoint that begin with a prefix, by the rest of the name."""
    names = (name for name in checkpoint.tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): name for name in names}


def refuse_infinite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse infinite values in float16.

    Raises:
        CheckpointError: With the name of the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.isinf().any():
            raise CheckpointError(
                f"{name!r} of {source} has values beyond the range of float16; use bf16 or fp32"
            )
