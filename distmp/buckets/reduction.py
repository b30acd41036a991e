"""Sums flat FP32 buckets over ranks while backward continues.

All ranks start the reductions in the same order, and the order of additions does not depend on
timing. After `finish` a rank holds the full sum, or its shard of it.
"""

# Note [Order, streams and memory of bucket reductions]
#
# Order. A process group matches the collectives of its ranks by the order in which each rank issues
# them; they have no names. If two ranks launched buckets in a different order, gradients of
# different parameters would be added. The order in which gradients arrive differs between ranks as
# soon as ranks use different parameters. So `Fp32GradBuckets` launches a bucket only after all
# buckets before it in an order that all ranks share. `AllToAllReduce` issues several collectives
# for each bucket, and keeps their order independent of timing as well: launching bucket n issues
# its all-to-all, then the all-gather of bucket n - 1. With several machines there are two
# all-to-alls, see Note [Order of the sum over ranks]: launching bucket n issues the first one of
# bucket n, the all-gather of bucket n - 2, then the second all-to-all of bucket n - 1. No rank
# tests whether a collective has completed in order to decide what to issue next.
#
# Streams. On CUDA, `launch` is called in a backward hook, on a stream that has waited for the
# gradients. `AllReduce` needs no stream: NCCL makes its own stream wait for the current one, and
# `Work.wait` in `finish` makes the current stream wait for NCCL's. `AllToAllReduce` has to wait for
# a collective in the middle of backward, to sum what it received. On the stream of backward this
# wait would hold up backward, so it uses a side stream: `_side_stream` makes the side stream wait
# for the gradients, and `finish` makes the current stream wait for the side stream. With NCCL the
# host never waits. On CPUs `Work.wait` blocks the host, and with it backward. Therefore the
# all-to-all of bucket n - 1 is waited for as late as possible: after that of bucket n was issued.
#
# Memory. A bucket must not be written until `finish` has returned: the collectives read or write
# it. The buffers of an all-to-all, `sent` and `received`, are allocated on the side stream. Freed
# memory goes back to that stream and is reused only by kernels and collectives that are queued
# after the wait for the collective that used it. `Exchange` holds both buffers until that wait. In
# FP32 on one machine `sent` is the bucket; on several machines it is a copy, because the first
# all-to-all sends the shards in another order. The sum is written to this rank's shard of the
# bucket. In FP32 the all-gather fills the other shards in place; in 16 bits it needs a buffer for
# the rounded sums of all ranks. A launch leaves one all-to-all (two with several machines) and one
# all-gather pending, so this memory is that of a few buckets.

# Note [Order of the sum over ranks]
#
# Floating-point sums depend on their order, so the order must not depend on timing. An exchange
# receives the pieces of all ranks before it adds any of them, and adds them in one of two orders:
#
# - `sum_rows` calls `torch.sum` on a GPU, once. Its order is the same in every run: it depends on
#   the number of ranks and the size of the shard. A loop over the pieces would launch one kernel
#   per rank, each of which reads and writes the FP32 sum: 10 bytes per received 16-bit value
#   instead of 2 + 4 / ranks. On a CPU it adds the pieces in rank order, in blocks whose sums stay
#   in the cache.
# - `sum_pairwise` is a balanced binary tree in rank order, which `reproducible` needs: the sum of
#   ranks 2k and 2k + 1 is the sum that one rank with the microbatches of both computes. torch has
#   no reduction with this order, so every level is one launch: log2(ranks) in total.
#
# With several machines, an exchange has two hops: over the ranks of a machine, then over the
# machines. A binary tree in rank order is the same tree with two hops, because both numbers of
# ranks are powers of two. After the first hop, a rank holds the machine's sum of the shards of all
# ranks with its local rank. It is rounded to the communication dtype, too: a 16-bit exchange over
# several machines rounds each value once and the sum of each machine once.

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from distmp.distributed.wait_times import collective_waits

# Number of sums that a CPU keeps in its cache while it adds rows; other devices call `torch.sum`.
SUMS_PER_BLOCK = {"cpu": 2**16}


class Exchange:
    """A tensor that is being summed over ranks.

    The first hop starts at once. Call `advance` once for each group.

    Args:
        values: The summands of this rank, the shards of all ranks in rank order; FP32, shape
            (ranks * n,).
        groups: The groups of the hops, see `exchange_groups`.
        comm_dtype: Communication dtype: float32, bfloat16 or float16.
        pairwise: Sum along a balanced binary tree over ranks.
    """

    def __init__(
        self,
        values: Tensor,
        groups: tuple[dist.ProcessGroup, ...],
        comm_dtype: torch.dtype,
        *,
        pairwise: bool = False,
    ) -> None:
        self.values = values
        self._groups = list(groups)
        self._comm_dtype = comm_dtype
        self._sum = sum_pairwise if pairwise else sum_rows
        self._start(_by_hop(values, groups))

    def advance(self, shard: Tensor) -> bool:
        """Wait for a hop and sum what it received; start the next hop, if there is one.

        Args:
            shard: Receives this rank's shard of the sum after the last hop; FP32, shape (n,). It
                may be a part of `values`.

        Returns:
            Whether this was the last hop.
        """
        self._work.wait()
        pieces = self._received.view(self._groups.pop(0).size(), -1)
        if not self._groups:
            self._sum(pieces, shard)
            return True
        partial = torch.empty(pieces.shape[1], dtype=shard.dtype, device=shard.device)
        self._sum(pieces, partial)
        self._start(partial)
        return False

    def _start(self, values: Tensor) -> None:
        # Both tensors must outlive the collective.
        contiguous = torch.contiguous_format
        self._sent = values.to(self._comm_dtype, memory_format=contiguous).contiguous()
        self._received = torch.empty_like(self._sent)
        self._work = all_to_all(self._received, self._sent, self._groups[0])


def _by_hop(values: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    """Order shards by the rank that receives them in the first hop, then in the next ones.

    Shards are in rank order, so the rank in the first group varies fastest.
    """
    sizes = [group.size() for group in groups]
    shards = values.view(*reversed(sizes), values.numel() // prod(sizes))
    return shards.permute(*reversed(range(len(sizes))), len(sizes))


def sum_rows(pieces: Tensor, out: Tensor) -> None:
    """Sum rows in FP32, in a fixed order; see Note [Order of the sum over ranks].

    Args:
        pieces: FP32 or 16-bit, shape (ranks, n).
        out: Receives the sum; FP32, shape (n,). It must not overlap `pieces`.
    """
    block = SUMS_PER_BLOCK.get(pieces.device.type)
    if block is None:
        torch.sum(pieces, 0, dtype=out.dtype, out=out)
        return
    for part, total in zip(pieces.split(block, dim=1), out.split(block), strict=True):
        total.copy_(part[0])
        for row in part[1:]:
            total.add_(row)


def sum_pairwise(pieces: Tensor, out: Tensor) -> None:
    """Sum the rows of `pieces`, shape (2^k, n), along a balanced binary tree, in FP32.

    FP32 pieces are overwritten.
    """
    rows = pieces.float()
    while len(rows) > 2:
        rows = rows[::2].add_(rows[1::2])
    if len(rows) == 2:
        torch.add(rows[0], rows[1], out=out)
    else:
        out.copy_(rows[0])


class Reduction(ABC):
    """Sums flat buckets over the ranks of a group, in place.

    Args:
        group: The ranks to sum over.
        shard: Whether a rank needs only its shard of the sum. The rest of a bucket is undefined
            then.
    """

    def __init__(self, group: dist.ProcessGroup, *, shard: bool) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.sharded = shard

    @abstractmethod
    def launch(self, bucket: Tensor) -> None:
        """Start to sum a bucket.

        Args:
            bucket: FP32, shape (n,), where n is a multiple of the number of ranks, except for
                a plain `AllReduce`.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for all launched reductions; on CUDA the current stream waits, not the host."""

    def shard(self, bucket: Tensor) -> Tensor:
        """Return this rank's shard, a view of shape (n / ranks,)."""
        length = bucket.numel() // self.world_size
        return bucket[self.rank * length : (self.rank + 1) * length]


class AllReduce(Reduction):
    """Sums in FP32 with the backend's all-reduce or reduce-scatter."""

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


class PendingGather(NamedTuple):
    """The all-gather of a bucket's sums, in flight.

    Attributes:
        bucket: The bucket, FP32, shape (n,).
        gathered: The tensor that receives the sums, shape (n,), in the communication dtype; the
            bucket itself in FP32.
        work: Handle of the collective.
    """

    bucket: Tensor
    gathered: Tensor
    work: dist.Work


class AllToAllReduce(Reduction):
    """Sums by all-to-all, a local sum in FP32 of each rank's shard, and all-gather.

    It sends as many bytes as a ring all-reduce in the communication dtype. With 16 bits, the value
    of every rank is rounded once before the sum, for any number of ranks, and the sum is rounded
    once more if it is gathered. A ring all-reduce rounds at every hop. Over several machines, the
    sum of each machine is rounded once more, see Note [Order of the sum over ranks].

    Args:
        group: The ranks to sum over.
        shard: Skip the all-gather.
        comm_dtype: Communication dtype: float32, bfloat16 or float16.
        pairwise: Sum along a balanced binary tree over ranks; its order is the same for every
            number of ranks and machines.
        groups: The groups of the exchanges, see `exchange_groups`; None exchanges over `group`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        shard: bool,
        comm_dtype: torch.dtype,
        pairwise: bool,
        groups: tuple[dist.ProcessGroup, ...] | None = None,
    ) -> None:
        super().__init__(group, shard=shard)
        self.comm_dtype = comm_dtype
        self._pairwise = pairwise
        self._groups = groups or (group,)
        self._exchanges: list[Exchange] = []
        self._gathers: list[PendingGather] = []
        self._stream: torch.cuda.Stream | None = None

    def launch(self, bucket: Tensor) -> None:
        self._device = bucket.device
        with self._side_stream(self._device):
            exchange = Exchange(bucket, self._groups, self.comm_dtype, pairwise=self._pairwise)
            # Sum the previous buckets while this one is in flight, and always at this point: see
            # Note [Order, streams and memory of bucket reductions].
            self._advance()
            # One pending all-gather keeps the network busy; more would only hold memory.
            self._finish_gathers(all_but=1)
            self._exchanges.append(exchange)

    def finish(self) -> None:
        if not (self._exchanges or self._gathers):
            return
        with self._side_stream(self._device):
            while self._exchanges:
                self._advance()
            self._finish_gathers()
        if self._stream is not None:
            with collective_waits.measured(self._device):
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _advance(self) -> None:
        """Let every bucket in flight take one hop, the oldest first."""
        exchanges, self._exchanges = self._exchanges, []
        for exchange in exchanges:
            bucket = exchange.values
            if not exchange.advance(self.shard(bucket)):
                self._exchanges.append(exchange)
            elif not self.sharded:
                self._gathers.append(self._gather(bucket))

    def _gather(self, bucket: Tensor) -> PendingGather:
        gathered, own = bucket, self.shard(bucket)
        if self.comm_dtype != bucket.dtype:
            gathered = torch.empty_like(bucket, dtype=self.comm_dtype)
            own = own.to(self.comm_dtype)
        return PendingGather(bucket, gathered, all_gather(gathered, own, self.group))

    def _finish_gathers(self, *, all_but: int = 0) -> None:
        """Wait for all-gathers, except for the latest `all_but`."""
        while len(self._gathers) > all_but:
            bucket, gathered, work = self._gathers.pop(0)
            work.wait()
            if gathered is not bucket:
                bucket.copy_(gathered)

    @contextlib.contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[None]:
        """On CUDA, run on a side stream, so that waiting does not delay backward."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream), collective_waits.on_side_stream():
            yield
