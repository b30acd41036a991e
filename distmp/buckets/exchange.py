"""Sums a tensor over ranks by all-to-all, so that each rank receives its shard of the sum."""

# Note [Order of the sum over ranks]
#
# Floating-point sums depend on their order, so the order must not depend on timing. An exchange
# receives the pieces of all ranks before it adds any of them, and adds them in one of two orders:
#
# - `sum_rows` calls `torch.sum`, on a GPU once. Its order is the same in every run: it depends on
#   the number of ranks, the size of the shard and the kind of device, but not on the number of
#   threads. A loop over the pieces would launch one kernel per rank, each of which reads and writes
#   the FP32 sum: 10 bytes per received 16-bit value instead of 2 + 4 / ranks.
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

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.collectives import all_to_all

# Number of 16-bit values that are summed at once, for devices on which `torch.sum` converts all of
# its input first. As FP32 they fit into the cache of a CPU.
VALUES_PER_BLOCK = {"cpu": 2**17}


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
    block = VALUES_PER_BLOCK.get(pieces.device.type)
    if block is None or pieces.dtype == out.dtype:
        torch.sum(pieces, 0, dtype=out.dtype, out=out)
        return
    width = max(1, min(block // len(pieces), out.numel()))
    # Allocated once, because an allocator may return freed memory to the system after each part.
    converted = torch.empty(len(pieces) * width, dtype=out.dtype, device=out.device)
    for part, total in zip(pieces.split(width, dim=1), out.split(width), strict=True):
        torch.sum(converted[: part.numel()].view(part.shape).copy_(part), 0, out=total)


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
