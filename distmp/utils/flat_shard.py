"""A contiguous range of a tensor's elements that is saved and loaded as a part of the tensor.

A sharded optimizer divides its flat buffers at any element, also in the middle of a row. A
checkpoint consists of rectangles, so that it can be loaded with any other sharding. A range of
elements consists of the end of a row, full rows, and the start of a row, recursively in each
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.utils.dtypes import is_dtensor

Shape = tuple[int, ...]


class Rectangle(NamedTuple):
    """A rectangular part of a tensor, and its position in a range of elements.

    Attributes:
        offsets: Index of its first element in each dimension of the full tensor.
        sizes: Its size in each dimension.
        start: Index of its first element in the range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def rectangles(shape: Shape, start: int, stop: int) -> list[Rectangle]:
    """Divide the elements [start, stop) of a row-major tensor into rectangles.

    Args:
        shape: Shape of the full tensor.
        start: First element, counted in row-major order.
        stop: One after the last element.
    """
    if 0 in shape:  # nothing to store but the shape
        return [Rectangle((0,) * len(shape), shape, 0)]
    if start >= stop:
        return []
    if not shape:
        return [Rectangle((), (), 0)]
    row = math.prod(shape[1:])
    first_row, end_row = -(-start // row), stop // row  # the full rows
    if first_row > end_row:  # inside one row
        return _in_row(shape, end_row, start, stop, start)
    parts = _in_row(shape, first_row - 1, start, first_row * row, start)
    if first_row < end_row:
        offsets = (first_row, *(0 for _ in shape[1:]))
        sizes = (end_row - first_row, *shape[1:])
        parts.append(Rectangle(offsets, sizes, first_row * row - start))
    return parts + _in_row(shape, end_row, end_row * row, stop, start)


def _in_row(shape: Shape, row: int, start: int, stop: int, run_start: int) -> list[Rectangle]:
    """Return the rectangles of [start, stop), a range inside one row of the first dimension."""
    row_start = row * math.prod(shape[1:])
    return [
        Rectangle((row, *offsets), (1, *sizes), at + start - run_start)
        for offsets, sizes, at in rectangles(shape[1:], start - row_start, stop - row_start)
    ]


class FlatShard(Tensor):
    """A 1-dim tensor with consecutive elements of a flattened tensor, from `start` on.

    torch.distributed.checkpoint (DCP) asks it for its rectangles. Operations treat it as a plain
    tensor; only `size()` returns the size of the full tensor.

    Attributes:
        global_shape: Shape of the full tensor, row-major.
        start: Index of the first element in the flattened full tensor.
    """

    global_shape: torch.Size
    start: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(values: Tensor, global_shape: torch.Size, start: int) -> FlatShard:
        """Return `values`, 1-dim, as a shard; memory is shared."""
        shard = torch.Tensor._make_subclass(FlatShard, values.detach())
        shard.global_shape, shard.start = global_shape, start
        return shard

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the full tensor, which DCP compares with the stored one.

        Args:
            dim: Return the size of this dimension only.
        """
        return self.global_shape if dim is None else self.global_shape[dim]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values and their position."""
        return FlatShard.of, (self.as_subclass(Tensor), self.global_shape, self.start)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        """Copy the values; torch's implementation requires `new_empty` to return this class."""
        values = self.as_subclass(Tensor).detach().clone()
        memo[id(self)] = copy = FlatShard.of(values, self.global_shape, self.start)
        return copy

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.global_shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
            for part in self._rectangles()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        flat = self.as_subclass(Tensor)
        for part in self._rectangles():
            if torch.Size(part.offsets) == index.offset:
                return _view(flat, part)
        raise ValueError(f"no part of {index.fqn!r} begins at {index.offset}")

    def _rectangles(self) -> list[Rectangle]:
        return rectangles(tuple(self.global_shape), self.start, self.start + self.numel())


def global_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the full tensor: that of a `FlatShard`'s or DTensor's full tensor."""
    return tensor.global_shape if isinstance(tensor, FlatShard) else tensor.shape


def local_parts(tensor: Tensor) -> list[tuple[tuple[slice, ...], Tensor]]:
    """Return the parts of a full tensor that this rank holds: their indices, and their memory.

    Args:
        tensor: A DTensor, a `FlatShard` or a plain tensor.
    """
    if isinstance(tensor, FlatShard):
        flat = tensor.as_subclass(Tensor)
        return [
            (_slices(part.offsets, part.sizes), _view(flat, part)) for part in tensor._rectangles()
        ]
    if is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sharded: Any = tensor
        sizes, offsets = compute_local_shape_and_global_offset(
            sharded.shape, sharded.device_mesh, sharded.placements
        )
        local = sharded.to_local()
        return [(_slices(offsets, sizes), local)] if local.numel() else []
    return [(_slices((0,) * tensor.dim(), tuple(tensor.shape)), tensor)]


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _view(flat: Tensor, part: Rectangle) -> Tensor:
    return flat[part.start : part.start + math.prod(part.sizes)].view(part.sizes)


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor or `FlatShard`, bit for bit; other tensors unchanged.

    Collective over the ranks that have a part of it.
    """
    if isinstance(tensor, FlatShard):
        size = math.prod(tensor.global_shape)
        flat = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
        flat[tensor.start : tensor.start + tensor.numel()] = tensor.as_subclass(Tensor)
        # As integers: a floating-point sum with zeros would lose the sign of a zero.
        dist.all_reduce(flat.view(torch.uint8))
        return flat.view(tensor.global_shape)
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
