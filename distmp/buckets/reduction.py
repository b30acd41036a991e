"""How a flat FP32 bucket is summed over ranks while backward goes on.

Every reduction is started in the same order on all ranks, and every sum is taken in an order that
does not depend on timing. After `finish` a rank holds the whole sum, or its shard of it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.collectives import all_gather, all_reduce, all_to_all, reduce_scatter


class Reduction(ABC):
    """Sums flat buckets over the ranks of a group, in place.

    Args:
        group: The ranks.
        shard: Whether a rank needs only its shard of the sum; the rest of a bucket is undefined
            then.
    """

    def __init__(self, group: dist.ProcessGroup, *, shard: bool) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.sharded = shard

    @abstractmethod
    def launch(self, bucket: Tensor) -> None:
        """Start to sum `bucket`, FP32 of shape (n,), n a multiple of the number of ranks."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for everything that was launched."""

    def shard(self, bucket: Tensor) -> Tensor:
        """Return this rank's shard, a view of shape (n / ranks,)."""
        length = bucket.numel() // self.world_size
        return bucket[self.rank * length : (self.rank + 1) * length]


class AllReduce(Reduction):
    """The backend's own FP32 all-reduce, or reduce-scatter."""

    def __init__(self, group: dist.ProcessGroup, *, shard: bool) -> None:
        super().__init__(group, shard=shard)
        self._pending: list[dist.Work] = []

    def launch(self, bucket: Tensor) -> None:
        if self.sharded:
            self._pending.append(reduce_scatter(self.shard(bucket), bucket, self.group))
        else:
            self._pending.append(all_reduce(bucket, self.group))

    def finish(self) -> None:
        for work in self._pending:
            work.wait()
        self._pending.clear()


class _Exchanged(NamedTuple):
    """A bucket whose pieces are on their way to the ranks that sum them."""

    bucket: Tensor
    sent: Tensor  # kept alive until it has arrived
    received: Tensor
    work: dist.Work


class PendingGather(NamedTuple):
    """A bucket whose sums are on their way back to all ranks."""

    bucket: Tensor
    arriving: Tensor
    work: dist.Work


class AllToAllReduce(Reduction):
    """All-to-all, a sum in FP32 on the rank that owns the shard, all-gather.

    As many bytes as a ring all-reduce of the wire's dtype. On a 16-bit wire every rank's value is
    rounded once before the sum, however many ranks there are, and the sum once more if it is
    gathered; a ring would round at every hop.

    Args:
        group: The ranks.
        shard: Leave out the all-gather.
        wire_dtype: What travels: float32, bfloat16 or float16.
        pairwise: Sum as a balanced binary tree over ranks instead of from the first to the last.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, shard: bool, wire_dtype: torch.dtype, pairwise: bool
    ) -> None:
        super().__init__(group, shard=shard)
        self.wire_dtype = wire_dtype
        self._sum = _sum_pairwise if pairwise else sum_in_order
        self._exchanged: _Exchanged | None = None
        self._gathered: list[PendingGather] = []
        self._stream: torch.cuda.Stream | None = None

    def launch(self, bucket: Tensor) -> None:
        with self._beside_backward(bucket.device):
            sent = bucket.to(self.wire_dtype)
            received = torch.empty_like(sent)
            work = all_to_all(received, sent, self.group)
            # The previous bucket is summed while this one travels. That it is this very moment,
            # and not when the bucket happens to have arrived, keeps the order of collectives the
            # same on all ranks.
            self._sum_previous()
            # One on its way back is enough to keep the wire busy, and holds memory.
            self._take_gathered(all_but=1)
            self._exchanged = _Exchanged(bucket, sent, received, work)

    def finish(self) -> None:
        for device in {entry.bucket.device for entry in self._outstanding()}:
            with self._beside_backward(device):
                self._sum_previous()
                self._take_gathered()
            if device.type == "cuda":
                assert self._stream is not None
                torch.cuda.current_stream(device).wait_stream(self._stream)

    def _outstanding(self) -> list[_Exchanged | PendingGather]:
        return [*self._gathered, *([self._exchanged] if self._exchanged else [])]

    def _sum_previous(self) -> None:
        if self._exchanged is None:
            return
        bucket, _, received, work = self._exchanged
        self._exchanged = None
        work.wait()
        own = self.shard(bucket)
        self._sum(received.view(self.world_size, -1), own)
        if self.sharded:
            return
        arriving = bucket
        if self.wire_dtype != bucket.dtype:
            arriving, own = received, own.to(self.wire_dtype)
        work = all_gather(arriving, own, self.group)
        self._gathered.append(PendingGather(bucket, arriving, work))

    def _take_gathered(self, *, all_but: int = 0) -> None:
        while len(self._gathered) > all_but:
            bucket, arriving, work = self._gathered.pop(0)
            work.wait()
            if arriving is not bucket:
                bucket.copy_(arriving)

    def _beside_backward(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """On CUDA, run on a stream of its own, so that waiting does not hold up backward."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)


def sum_in_order(pieces: Tensor, out: Tensor) -> None:
    """Write the sum of the rows of `pieces`, shape (ranks, n), to `out`, FP32 of shape (n,)."""
    out.copy_(pieces[0])
    for piece in pieces[1:]:
        out.add_(piece)


def _sum_pairwise(pieces: Tensor, out: Tensor) -> None:
    """Write the sum of the rows of `pieces`, shape (2^k, n), as a balanced binary tree, in FP32."""
    rows = list(pieces.float().unbind())
    while len(rows) > 1:
        # In place: what has arrived is of no other use.
        rows = [left.add_(right) for left, right in zip(rows[::2], rows[1::2], strict=True)]
    out.copy_(rows[0])
