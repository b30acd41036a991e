"""Sums the statistics of a step over ranks, in one all-reduce."""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from distmp.distributed.compare_ranks import Fingerprint
from distmp.distributed.world import World
from distmp.engine.microbatches import MicrobatchStats
from distmp.parallel import Strategy
from distmp.scaling.ordered import ordered_total
from distmp.scaling.step_decision import SUMS, all_reduce_stats, local_stats, pack


def sum_over_ranks(
    strategy: Strategy,
    stats: MicrobatchStats,
    fingerprint: Fingerprint,
    of_products: Tensor | None,
    world: World,
    *,
    stop: bool,
    reproducible: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the statistics of a step over ranks, in one all-reduce; the host does not wait.

    Args:
        strategy: Holds the gradients of the step.
        stats: Losses and weights of the microbatches of this rank.
        fingerprint: The settings of the step on this rank.
        of_products: See `LowPrecisionMatmuls.terms`.
        world: The ranks, all of which have to call this.
        stop: Whether this rank requests to stop.
        reproducible: Whether the sums must not depend on the number of ranks.

    Returns:
        The first argument of `decide_step`, with a weight of NaN if one is negative; whether ranks
        take the step with different settings, 0-dim bool; and the sums of `of_products`, FP64,
        empty without them.
    """
    dropped = sum(stats.dropped) if stats.dropped else 0.0
    # One kernel. The sum of weights with both signs would look right.
    weights = F.threshold(pack(*stats.weights, device=world.device), -sys.float_info.min, math.nan)
    if reproducible:
        total = ordered_total(
            strategy.gradient_shards(),
            stats.loss_sums,
            weights.unbind(),
            stop=stop,
            dropped=dropped,
            more=fingerprint.terms,
            exact=of_products,
            group=world.group,
            device=world.device,
        )
        total, terms, sums = total.tensor_split([SUMS, SUMS + len(fingerprint.terms)])
        return total, fingerprint.differs(terms), sums
    local = local_stats(
        strategy.gradients(),
        pack(*stats.loss_sums, device=world.device).sum(),
        weights.sum(),
        stop=stop,
        dropped=dropped,
        device=world.device,
    )
    if of_products is not None:
        local = torch.cat([local, of_products])
    total, differ = fingerprint.sum_over_ranks(
        local, lambda values: all_reduce_stats(values, world.group)
    )
    return total[:SUMS], differ, total[SUMS:]
