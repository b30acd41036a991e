"""A run of a tensor's elements that is saved and loaded as a part of the whole tensor.

A sharded optimizer cuts its flat buffers where it needs to, also in the middle of a row. But
checkpoints are made of rectangles, so that they can be loaded with any other sharding. A run of
elements is the rest of a row, whole rows, and the beginning of a row, and so on in each dimension.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Rectangle(NamedTuple):
    """A part of a tensor, and where it lies in a run of elements.

    Attributes:
        offsets: Its first element in each dimension of the whole tensor.
        sizes: Its extent in each dimension.
        start: Its first element in the run.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> list[Rectangle]:
    """Divide the elements [start, stop) of a row-major tensor into rectangles.

    Args:
        shape: Of the whole tensor.
        start: First element, counted in row-major order.
        stop: Behind the last one.
    """
    if start >= stop:
        return []
    if not shape:
        return [Rectangle((), (), 0)]
    row = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # inside one row
        return _in_row(shape, end_whole, start, stop, start)
    found = _in_row(shape, first_whole - 1, start, first_whole * row, start)
    if first_whole < end_whole:
        offsets = (first_whole, *(0 for _ in shape[1:]))
        sizes = (end_whole - first_whole, *shape[1:])
        found.append(Rectangle(offsets, sizes, first_whole * row - start))
    return found + _in_row(shape, end_whole, end_whole * row, stop, start)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int, run_start: int
) -> list[Rectangle]:
    """Return the rectangles of [start, stop), which lies in one row of the first dimension."""
    row_start = row * math.prod(shape[1:])
    return [
        Rectangle((row, *offsets), (1, *sizes), at + start - run_start)
        for offsets, sizes, at in rectangles(shape[1:], start - row_start, stop - row_start)
    ]


class FlatShard(Tensor):
    """A 1-dim tensor that holds the elements from `start` on of a flattened tensor.

    torch.distributed.checkpoint asks it for its rectangles. Every operation sees a plain tensor;
    only `size()` tells of the whole.

    Attributes:
        whole_shape: Shape of the whole tensor, row-major.
        start: First element of the slice in the flattened whole.
    """

    whole_shape: torch.Size
    start: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(values: Tensor, whole_shape: torch.Size, start: int) -> FlatShard:
        """Return `values`, 1-dim, as a slice; memory is shared."""
        found = torch.Tensor._make_subclass(FlatShard, values.detach())
        found.whole_shape, found.start = whole_shape, start
        return found

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the whole tensor: DCP compares it with the stored one by this name.

        Args:
            dim: Of one dimension only.
        """
        return self.whole_shape if dim is None else self.whole_shape[dim]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values and where they belong."""
        return FlatShard.of, (self.as_subclass(Tensor), self.whole_shape, self.start)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        """Copy the values; torch's own way needs `new_empty` to return this class."""
        values = self.as_subclass(Tensor).detach().clone()
        memo[id(self)] = found = FlatShard.of(values, self.whole_shape, self.start)
        return found

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.whole_shape,
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
                size = math.prod(part.sizes)
                return flat[part.start : part.start + size].view(part.sizes)
        raise ValueError(f"no part of {index.fqn!r} begins at {index.offset}")

    def _rectangles(self) -> list[Rectangle]:
        return rectangles(tuple(self.whole_shape), self.start, self.start + self.numel())


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the tensor that `tensor` is a part of, as checkpoints have it."""
    return tensor.whole_shape if isinstance(tensor, FlatShard) else tensor.shape


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor or slice, bit by bit; every rank that has a part calls it."""
    if isinstance(tensor, FlatShard):
        size = math.prod(tensor.whole_shape)
        flat = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
        flat[tensor.start : tensor.start + tensor.numel()] = tensor.as_subclass(Tensor)
        # As integers: a sum with zeros would lose the sign of a zero.
        dist.all_reduce(flat.view(torch.uint8))
        return flat.view(tensor.whole_shape)
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
