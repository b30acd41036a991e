"""The nominal weight, a constant that keeps gradients at the magnitude of a mean."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.world import World


def agree_on_nominal_weight(
    batch_weight: Tensor, microbatches: int, world: World, *, reproducible: bool
) -> float | None:
    """Return the nominal weight of a run, from the first microbatch of each rank.

    Args:
        batch_weight: Weight of the first microbatch of this rank, 0-dim.
        microbatches: Number of microbatches on each rank.
        world: The ranks, all of which have to call this.
        reproducible: Whether it must not depend on the number of ranks.

    Returns:
        The sum of the weights, rounded up to a power of two; None if it is not a finite number
        above 0.
    """
    weight = batch_weight.to(torch.float64, copy=True) * microbatches
    if reproducible:
        # The first microbatch of the global batch is on rank 0 for any number of ranks.
        weight = weight * world.world_size if world.rank == 0 else weight.zero_()
    if world.group is not None:
        dist.all_reduce(weight, group=world.group)
    total = weight.item()
    return round_up_to_power_of_two(total) if 0 < total < math.inf else None


def round_up_to_power_of_two(weight: float) -> float:
    """Round up to a power of two; dividing the loss by it is exact."""
    return 2.0 ** math.ceil(math.log2(weight))
