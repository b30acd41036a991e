"""Gathers each sharded matrix on one rank, its owner, and returns the owner's result as shards.

A matrix is divided over ranks into consecutive ranges of its elements in row-major order. Its owner
receives all ranges by an all-to-all, computes, and sends each range of the result back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.collectives import all_to_all

# Number of elements of full matrices that a rank holds at a time, unless a single matrix is larger:
# 64 MiB in FP32. Smaller rounds would need more collectives.
ROUND_ELEMENTS = 2**24


class ShardedMatrix(NamedTuple):
    """A matrix whose elements are divided over ranks.

    Attributes:
        shape: Shape of the full matrix.
        bounds: Rank r holds the elements from bounds[r] to bounds[r + 1], in row-major order.
    """

    shape: torch.Size
    bounds: Sequence[int]

    def size(self, rank: int) -> int:
        """Return the number of elements that a rank holds."""
        return self.bounds[rank + 1] - self.bounds[rank]


class Owners:
    """Assigns matrices to ranks and exchanges them, the same on all ranks.

    Matrices go to owners in rounds, so that a rank holds few full matrices at a time. The
    assignment depends only on shapes and the number of ranks.

    Args:
        matrices: The matrices, in the same order on all ranks.
        costs: Cost of the computation for each matrix; the sum per rank is balanced.
        group: The ranks.
        round_elements: Number of elements of full matrices per rank and round.
    """

    def __init__(
        self,
        matrices: Sequence[ShardedMatrix],
        costs: Sequence[float],
        group: dist.ProcessGroup,
        round_elements: int = ROUND_ELEMENTS,
    ) -> None:
        self._matrices = matrices
        self._group = group
        self._rank, self._ranks = group.rank(), group.size()
        by_owner = assign(costs, self._ranks)
        sizes = [matrix.shape.numel() for matrix in matrices]
        batches = [_batches(owned, sizes, round_elements) for owned in by_owner]
        # Round k: the k-th batch of each owner.
        self._rounds = [
            [owned[index] if index < len(owned) else [] for owned in batches]
            for index in range(max(map(len, batches)))
        ]

    def compute(
        self, shard: Callable[[int], Tensor], function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Apply a function to each matrix on its owner; yield this rank's shard of each result.

        Collective over the ranks: consume all results.

        Args:
            shard: Returns this rank's elements of a matrix by its index, 1-dim; called once per
                matrix.
            function: Called with a matrix; returns a tensor of the same shape and dtype.
        """
        for by_owner in self._rounds:
            indices = [index for owned in by_owner for index in owned]
            shards = [shard(index) for index in indices]
            received = self._send(torch.cat(shards), by_owner, to_owners=True)
            results = [*map(function, self._assembled(received, by_owner))]
            del received
            divided = self._divided(results, by_owner) if results else shards[0][:0]
            del results
            pieces = self._send(divided, by_owner, to_owners=False)
            yield from zip(indices, pieces.split([len(shard) for shard in shards]), strict=True)

    def _send(self, values: Tensor, by_owner: list[list[int]], *, to_owners: bool) -> Tensor:
        """Exchange the shards of a round, or the results."""
        matrices = self._matrices
        shares = [sum(matrices[i].size(self._rank) for i in owned) for owned in by_owner]
        own = by_owner[self._rank]
        parts = [sum(matrices[i].size(rank) for i in own) for rank in range(self._ranks)]
        sent, expected = (shares, parts) if to_owners else (parts, shares)
        received = values.new_empty(sum(expected))
        all_to_all(received, values, self._group, expected, sent).wait()
        return received

    def _assembled(self, received: Tensor, by_owner: list[list[int]]) -> Iterator[Tensor]:
        """Yield the matrices that this rank owns, from the shards of all ranks."""
        owned = by_owner[self._rank]
        sizes = [self._matrices[i].size(rank) for rank in range(self._ranks) for i in owned]
        pieces = received.split(sizes)
        for position, index in enumerate(owned):
            yield torch.cat(pieces[position :: len(owned)]).view(self._matrices[index].shape)

    def _divided(self, results: list[Tensor], by_owner: list[list[int]]) -> Tensor:
        """Return the results of this rank as one tensor, divided into shards in rank order."""
        owned = zip(results, by_owner[self._rank], strict=True)
        shards = [
            result.reshape(-1).split([self._matrices[index].size(r) for r in range(self._ranks)])
            for result, index in owned
        ]
        return torch.cat([part for parts in zip(*shards, strict=True) for part in parts])


def assign(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign work to ranks: the most expensive first, each to the rank with the least work.

    Args:
        costs: Cost of each piece of work.
        ranks: Number of ranks.

    Returns:
        The indices of the pieces of each rank, ascending.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = heapq.heappop(loads)
        owned[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return [sorted(indices) for indices in owned]


def _batches(indices: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Divide indices into runs whose sizes sum to at most `limit`, or that have one index."""
    batches: list[list[int]] = []
    total = 0
    for index in indices:
        if not batches or total + sizes[index] > limit:
            batches.append([])
            total = 0
        batches[-1].append(index)
        total += sizes[index]
    return batches
