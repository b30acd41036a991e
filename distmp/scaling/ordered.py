"""Sums the statistics of a step in an order that does not depend on the number of ranks.

Each sum is a balanced binary tree over fixed leaves: the elements of a chunk, the chunks of a
bucket, the microbatches of the global batch. Every leaf has its own element in the reduced vector,
which is zero on all ranks but one, so the reduction itself does not round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.scaling.norms import CHUNK
from distmp.scaling.step_decision import not_finite, pack

# Number of elements that are squared at once; it does not change the bits. On a CPU a block fits
# into the cache. On a GPU a block takes 16 launches and 8 bytes per element: at most 128 MiB.
ELEMENTS_PER_BLOCK = {"cpu": 16 * CHUNK}
DEFAULT_ELEMENTS_PER_BLOCK = 2**24
# Leaves of a subtree, a power of two. The chunks of a bucket of 25 MiB fit into one.
SUBTREE = 512


def ordered_total(
    shards: Sequence[Tensor],
    losses: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    stop: bool,
    dropped: Tensor | float,
    more: Sequence[float] = (),
    exact: Tensor | None = None,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Return the sum of `local_stats` over all ranks, bitwise the same for any 2^k ranks.

    Args:
        shards: This rank's shard of every gradient bucket, 1-dim FP32; the number of elements is a
            multiple of `CHUNK`.
        losses: Loss sum of each microbatch of this rank, 0-dim; the same number on every rank.
        weights: Weight of each microbatch of this rank, 0-dim.
        stop: Whether this rank requests to stop.
        dropped: Number of microbatches of this rank that were dropped as non-finite.
        more: Further numbers whose sums over ranks are exact, appended to the result.
        exact: FP64, 1-dim, integers to sum, appended to the result.
        group: The ranks, in the order of their microbatches; None for a single process.
        device: Device of the reduction.
    """
    rank = 0 if group is None else dist.get_rank(group)
    world_size = 1 if group is None else dist.get_world_size(group)
    counts = pack(float(stop), dropped, *more, device=device)
    if exact is not None:
        counts = torch.cat([counts, exact])
    local = torch.cat([pack(*losses, *weights, device=device), chunk_squares(shards)])
    lengths = [len(losses), len(weights), *(len(shard) // CHUNK for shard in shards)]
    # For each sum one row per rank; this rank fills its own.
    leaves = torch.zeros(world_size * len(local), dtype=torch.float64, device=device)
    own = [rows.view(world_size, -1)[rank] for rows in _split(leaves, lengths, world_size)]
    torch._foreach_copy_(own, local.split(lengths))
    vector = torch.cat([counts, leaves])
    if group is not None:
        dist.all_reduce(vector, group=group)
    counts, leaves = vector[: len(counts)], vector[len(counts) :]
    sums = pairwise_sums(_split(leaves, lengths, world_size))
    loss_and_weight, squares = sums[:2], sums[2:]
    square = pairwise_sums([squares])
    return torch.cat([square, not_finite(square).double(), loss_and_weight, counts])


def chunk_squares(shards: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each chunk of `CHUNK` elements of the shards, 1-dim FP64.

    Uses element-wise operations only: the order in which torch's reductions add their terms depends
    on the shape and the device.

    Args:
        shards: 1-dim FP32 on one device; the number of elements is a multiple of `CHUNK`.
    """
    device = shards[0].device
    size = ELEMENTS_PER_BLOCK.get(device.type, DEFAULT_ELEMENTS_PER_BLOCK)
    elements = sum(len(shard) for shard in shards)
    # Allocated once: a CPU may return freed memory to the system, and clear it for each block.
    buffer = torch.empty(min(size, elements), dtype=torch.float64, device=device)
    return torch.cat([_squares_of_block(block, buffer) for block in _blocks(shards, size)])


def pairwise_sums(parts: Sequence[Tensor]) -> Tensor:
    """Sum each 1-dim tensor as a balanced binary tree; zeros at the end do not change the bits.

    One operation computes a level of all trees: the longest tensor determines the launches.

    Args:
        parts: At least one tensor; all have the same dtype and device, and at least one element.

    Returns:
        The sums, 1-dim, of shape (number of tensors,).
    """
    zeros = parts[0].new_zeros(SUBTREE)
    while any(len(part) > 1 for part in parts):
        padded = [leaves for part in parts for leaves in (part, zeros[: -len(part) % SUBTREE])]
        rows = torch.cat(padded).view(-1, SUBTREE)
        while rows.shape[1] > 1:
            rows = rows[:, ::2] + rows[:, 1::2]
        parts = rows[:, 0].split([-(-len(part) // SUBTREE) for part in parts])
    return torch.cat([*parts])


def _split(leaves: Tensor, lengths: Sequence[int], world_size: int) -> Sequence[Tensor]:
    return leaves.split([world_size * length for length in lengths])


def _blocks(shards: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield blocks of up to `size` elements, in order; split large shards and join small ones."""
    block: list[Tensor] = []
    filled = 0
    for piece in (piece for shard in shards for piece in shard.split(size)):
        if filled + len(piece) > size:
            yield block
            block, filled = [], 0
        block.append(piece)
        filled += len(piece)
    yield block


def _squares_of_block(block: list[Tensor], buffer: Tensor) -> Tensor:
    lengths = [len(piece) for piece in block]
    values = buffer[: sum(lengths)]
    torch._foreach_copy_(values.split(lengths), block)
    sums = values.square_().view(-1, CHUNK)
    while sums.shape[1] > 2:
        left, right = sums.chunk(2, dim=1)
        sums = left.add_(right)
    return sums[:, 0] + sums[:, 1]
