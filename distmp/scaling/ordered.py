"""The measurements of a step, summed in an order that does not depend on the number of ranks.

Each sum is a balanced binary tree over fixed leaves: elements of a chunk, chunks of a bucket, the
microbatches of the global batch. Every leaf has one place in the vector that the ranks reduce, and
all ranks but one have a zero there, so that the reduction itself rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.scaling.norms import CHUNK
from distmp.scaling.step_decision import pack

# Elements that are squared at once: what fits into a CPU's cache in FP64.
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
    """Return the sum of `local_stats` over all ranks, bitwise the same at any 2^k ranks.

    Args:
        shards: This rank's shard of every gradient bucket, FP32, of a multiple of `CHUNK` elements.
        losses: Loss sum of each microbatch of this rank, 0-dim; as many on every rank.
        weights: Weight of each microbatch of this rank, 0-dim.
        stop: This rank asks to stop.
        dropped: How many microbatches of this rank were left out as not finite.
        more: Further numbers whose sums over ranks are exact, appended to the result.
        group: The ranks, in whose order the microbatches stand; None for a single process.
        device: Where the reduction runs.
    """
    rank = 0 if group is None else dist.get_rank(group)
    world_size = 1 if group is None else dist.get_world_size(group)
    pieces = [
        pack(*losses, device=device),
        pack(*weights, device=device),
        *(chunk_squares(shard) for shard in shards),
    ]
    places = [
        torch.zeros(world_size, len(piece), dtype=torch.float64, device=device) for piece in pieces
    ]
    for place, piece in zip(places, pieces, strict=True):
        place[rank].copy_(piece)
    counts = pack(float(stop), dropped, *more, device=device)
    vector = torch.cat([counts, *(place.view(-1) for place in places)])
    if group is not None:
        dist.all_reduce(vector, group=group)
    counts, ordered = vector[: len(counts)], vector[len(counts) :]
    loss, weight, *squares = (
        pairwise_sum(part) for part in ordered.split([place.numel() for place in places])
    )
    square = pairwise_sum(torch.stack(squares))
    measured = torch.stack([square, (~square.isfinite()).double(), loss, weight])
    return torch.cat([measured, counts])


def chunk_squares(flat: Tensor) -> Tensor:
    """Return the sum of squares of each `CHUNK` elements of a 1-dim tensor, FP64.

    Made of element-wise operations only: how torch's own reductions group their terms depends on
    the shape and the device.
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
