"""The state of an engine as pieces that ranks hold, and its reassembly.

Nothing is communicated while a case runs: every rank notes its own pieces after each step, and
whoever judges the case puts them together. Where pieces of several ranks cover the same elements,
they have to be the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distmp.utils.flat_shard import FlatShard

# The history by which spikes are judged; no case judges them.
IGNORED = "divergence/"


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a tensor.

    Attributes:
        values: Its elements.
        shape: Of the whole tensor.
        offsets: Where the values begin in each dimension; a run of elements has the one offset in
            the flattened tensor.
        flat: Whether the values are such a run.
    """

    values: Tensor
    shape: torch.Size
    offsets: tuple[int, ...] = ()
    flat: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """Return the view of a whole tensor that this piece covers."""
        if self.flat:
            return whole.view(-1)[self.offsets[0] : self.offsets[0] + self.values.numel()]
        for dim, (offset, size) in enumerate(zip(self.offsets, self.values.shape, strict=False)):
            whole = whole.narrow(dim, offset, size)
        return whole


State = dict[str, Piece]


def pieces(state: Mapping[str, Tensor]) -> State:
    """Return copies of what this rank holds."""
    return {name: _piece(t) for name, t in state.items() if not name.startswith(IGNORED)}


def _piece(tensor: Tensor) -> Piece:
    if isinstance(tensor, FlatShard):
        values = tensor.detach().as_subclass(Tensor).clone()
        return Piece(values, torch.Size(tensor.whole_shape), (tensor.start,), flat=True)
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        values = tensor.detach().to_local().clone()
        # An empty shard begins behind the end.
        return Piece(values, tensor.shape, tuple(offsets) if values.numel() else (0,))
    return Piece(tensor.detach().clone(), tensor.shape)


def assemble(states: Sequence[State]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the whole tensors of all ranks, and the names of those on which ranks disagree."""
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
    """Yield the names of what a rank holds otherwise; a state of zeros is as good as none."""
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
