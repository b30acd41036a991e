"""The state of an engine as pieces of ranks, and its reassembly.

A running case has no additional communication: every rank records its pieces after each step, and
the rank that checks the case combines them. If pieces of several ranks cover the same elements,
they must be bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distmp.utils.flat_shard import FlatShard

# The history of the spike check, which no case uses.
IGNORED = "divergence/"


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that a rank holds.

    Attributes:
        values: The elements of the part.
        shape: Shape of the full tensor.
        offsets: Index of the first element in each dimension; of a flat range, its one offset in
            the flattened tensor.
        flat: Whether the values are a range of the flattened tensor.
    """

    values: Tensor
    shape: torch.Size
    offsets: tuple[int, ...] = ()
    flat: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """Return the view of a full tensor that this piece covers."""
        if self.flat:
            return whole.view(-1)[self.offsets[0] : self.offsets[0] + self.values.numel()]
        for dim, (offset, size) in enumerate(zip(self.offsets, self.values.shape, strict=False)):
            whole = whole.narrow(dim, offset, size)
        return whole

    def __reduce__(self) -> tuple[Any, ...]:
        # A case sends hundreds of pieces; pickling a tensor takes ten times as long as an array.
        bits, values = _bits(self.values).numpy(), self.values
        return _unpickled, (bits, values.dtype, values.shape, self.shape, self.offsets, self.flat)


def _unpickled(
    bits: np.ndarray[Any, Any], dtype: torch.dtype, shape: torch.Size, *others: Any
) -> Piece:
    return Piece(torch.from_numpy(bits).view(dtype).view(shape), *others)


State = dict[str, Piece]


def pieces(state: Mapping[str, Tensor]) -> State:
    """Return copies of the parts of this rank."""
    return {name: _piece(t) for name, t in state.items() if not name.startswith(IGNORED)}


def _piece(tensor: Tensor) -> Piece:
    if isinstance(tensor, FlatShard):
        values = tensor.detach().as_subclass(Tensor).clone()
        return Piece(values, torch.Size(tensor.global_shape), (tensor.start,), flat=True)
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        values = tensor.detach().to_local().clone()
        # An empty shard starts after the end.
        return Piece(values, tensor.shape, tuple(offsets) if values.numel() else (0,))
    return Piece(tensor.detach().clone(), tensor.shape)


def assemble(states: Sequence[State]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the full tensors of all ranks, and the names of tensors that differ between ranks."""
    wholes: dict[str, Tensor] = {}
    conflicts = []
    for name in dict.fromkeys(name for state in states for name in state):
        held = [state[name] for state in states if name in state]
        whole = torch.zeros(held[0].shape, dtype=held[0].values.dtype)
        for piece in held:
            piece.of(whole).copy_(piece.values)
        if not all(same_bits(piece.of(whole), piece.values) for piece in held):
            conflicts.append(name)
        wholes[name] = whole
    return wholes, conflicts


def changes(before: State, after: State) -> Iterator[str]:
    """Yield the names of values that differ; a missing state equals a state of zeros."""
    for name in before.keys() | after.keys():
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            present = one or other
            assert present is not None
            if present.values.any():
                yield name
        elif not same_bits(one.values, other.values):
            yield name


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
