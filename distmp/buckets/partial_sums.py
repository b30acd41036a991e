"""Sums of microbatch gradients in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distmp.buckets.layout import BucketLayout


class FlatGradients:
    """One set of flat FP32 buffers, a buffer for each bucket.

    Attributes:
        buffers: The flat buffers, FP32, shape (size of the bucket's layout,), initially zero.
        views: For each bucket, a view of its buffer for each parameter, in the parameter's shape.
    """

    def __init__(self, layouts: Sequence[BucketLayout]) -> None:
        self.buffers = [
            torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
            for layout in layouts
        ]
        self.views = [
            layout.views(buffer) for layout, buffer in zip(layouts, self.buffers, strict=True)
        ]


class PartialSums:
    """A binary counter of partial sums: the k-th microbatch is a leaf of one fixed binary tree.

    After m microbatches there is one partial sum for each 1 in the binary representation of m, so k
    microbatches need log2(k) sets of buffers besides the one that backward writes to. A value is
    rounded log2(k) times instead of k times.

    Args:
        layouts: The layouts of the buckets.
        pairwise: False adds one microbatch after the other, with a single set of buffers.
    """

    def __init__(self, layouts: Sequence[BucketLayout], *, pairwise: bool) -> None:
        self._layouts = layouts
        self._pairwise = pairwise
        self._levels: list[FlatGradients | None] = []
        self._spare: list[FlatGradients] = []

    @property
    def buffers(self) -> list[Tensor]:
        """All flat buffers, in use or free."""
        return [buffer for stored in (*self._stored(), *self._spare) for buffer in stored.buffers]

    def clear(self) -> None:
        """Drop all sums; their buffers are reused."""
        self._spare += [stored for stored in self._levels if stored is not None]
        self._levels = []

    def add(self, leaf: FlatGradients) -> FlatGradients:
        """Add the gradients of a microbatch; return uninitialized buffers for the next one."""
        level, carried = 0, leaf
        while level < len(self._levels) and (stored := self._levels[level]) is not None:
            for total, addend in zip(stored.buffers, carried.buffers, strict=True):
                total += addend
            self._spare.append(carried)
            carried = stored
            if not self._pairwise:
                break
            self._levels[level] = None
            level += 1
        self._levels[level : level + 1] = [carried]
        return self._spare.pop() if self._spare else FlatGradients(self._layouts)

    def add_last(self, leaf: FlatGradients, bucket: int) -> Tensor:
        """Add one bucket of the last microbatch to all earlier sums.

        Returns:
            The buffer with the total, one of the set that `total_after` returns.
        """
        carried = leaf.buffers[bucket]
        for stored in self._stored():
            stored.buffers[bucket] += carried
            carried = stored.buffers[bucket]
        return carried

    def total_after(self, leaf: FlatGradients) -> FlatGradients:
        """Return the set that holds the total after `add_last` was called for every bucket."""
        stored = self._stored()
        return stored[-1] if stored else leaf

    def _stored(self) -> list[FlatGradients]:
        return [stored for stored in self._levels if stored is not None]
