"""Sums of microbatch gradients in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distmp.buckets.layout import BucketLayout


class FlatGradients:
    """One set of flat FP32 buffers, a buffer for each bucket.

    Args:
        layouts: The layouts of the buckets.
        rank: This rank.
        shards: Number of ranks that each bucket is divided over.

    Attributes:
        buffers: The flat buffers, FP32, shape (size of the bucket's layout,), initially zero.
        views: For each parameter of each bucket, its part of the buffer, in its shape.
        updated: For each parameter, the part of the buffer in this rank's shard, 1-dim; without
            shards, its view.
        addresses: Where each view is in memory.
    """

    def __init__(self, layouts: Sequence[BucketLayout], rank: int = 0, shards: int = 1) -> None:
        self.buffers = [
            torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
            for layout in layouts
        ]
        of_buckets = list(zip(layouts, self.buffers, strict=True))
        self.views = [view for layout, flat in of_buckets for view in layout.views(flat)]
        self.updated = self.views
        if shards > 1:
            self.updated = [
                flat[offset:][layout.shard_range(index, layout.shard(rank, shards))]
                for layout, flat in of_buckets
                for index, offset in enumerate(layout.offsets)
            ]
        self.addresses = self.current_addresses()

    def current_addresses(self) -> list[int]:
        """Return where each view is now, which differs from `addresses` once it was moved."""
        return list(map(Tensor.data_ptr, self.views))


class PartialSums:
    """A binary counter of partial sums: the k-th microbatch is a leaf of one fixed binary tree.

    After m microbatches there is one partial sum for each 1 in the binary representation of m, so k
    microbatches need log2(k) sets of buffers besides the one that backward writes to. A value is
    rounded log2(k) times instead of k times.

    Args:
        create: Allocates a set of buffers.
        pairwise: False adds one microbatch after the other, with a single set of buffers.
    """

    def __init__(self, create: Callable[[], FlatGradients], *, pairwise: bool) -> None:
        self._create = create
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
        return self._spare.pop() if self._spare else self._create()

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
