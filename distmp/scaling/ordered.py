"""Sums the statistics of a step in an order that does not depend on the number of ranks.

Each sum is a balanced binary tree over fixed leaves: the elements of a chunk, the chunks of a
bucket, the microbatches of the global batch. Every leaf has its own element in the reduced vector,
which is zero on all ranks but one, so the reduction itself does not round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.scaling.norms import CHUNK
from distmp.scaling.step_decision import pack

# Elements that are squared at once: they fit into the cache of a CPU in FP64.
BLOCK = 16 * CHUNK


def ordered_total(
    shards: Sequence[Tensor],
    losses: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    stop: bool,
    dropped: Tensor | float,
    more: Sequence[float] = (),
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
        group: The ranks, in the order of their microbatches; None for a single process.
        device: Device of the reduction.
    """
    rank = 0 if group is None else dist.get_rank(group)
    world_size = 1 if group is None else dist.get_world_size(group)
    local_leaves = [
        pack(*losses, device=device),
        pack(*weights, device=device),
        *(chunk_squares(shard) for shard in shards),
    ]
    # One row per rank; this rank fills its own.
    leaves = [
        torch.zeros(world_size, len(local), dtype=torch.float64, device=device)
        for local in local_leaves
    ]
    for rows, local in zip(leaves, local_leaves, strict=True):
        rows[rank].copy_(local)
    counts = pack(float(stop), dropped, *more, device=device)
    vector = torch.cat([counts, *(rows.view(-1) for rows in leaves)])
    if group is not None:
        dist.all_reduce(vector, group=group)
    counts, ordered = vector[: len(counts)], vector[len(counts) :]
    loss, weight, *squares = (
        pairwise_sum(part) for part in ordered.split([rows.numel() for rows in leaves])
    )
    square = pairwise_sum(torch.stack(squares))
    sums = torch.stack([square, (~square.isfinite()).double(), loss, weight])
    return torch.cat([sums, counts])


def chunk_squares(flat: Tensor) -> Tensor:
    """Return the sum of squares of each chunk of `CHUNK` elements of a 1-dim tensor, 1-dim FP64.

    Uses element-wise operations only: the order in which torch's reductions add their terms depends
    on the shape and the device.
    """
    return torch.cat([_sum_rows(block.double().square_()) for block in flat.split(BLOCK)])


def pairwise_sum(values: Tensor) -> Tensor:
    """Sum a 1-dim tensor as a balanced binary tree; zeros at the end do not change the bits."""
    width = 1 << max(len(values) - 1, 0).bit_length()
    row = torch.zeros(1, width, dtype=values.dtype, device=values.device)
    row[0, : len(values)] = values
    while row.shape[1] > 1:
        row = row[:, ::2] + row[:, 1::2]
    return row[0, 0]


def _sum_rows(block: Tensor) -> Tensor:
    rows = block.view(-1, CHUNK)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]
