"""Chooses where a sharded strategy accumulates gradients of microbatches."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from distmp.distributed.rank_environment import local_world_size
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.settings import Accumulation
from distmp.precision.policy import PrecisionPolicy
from distmp.utils.processes import free_host_bytes
from distmp.utils.units import bytes_text

Place = Literal["sharded", "unsharded", "hybrid"]

# Largest share of the free memory for FP32 gradients of the full model. Activations, gathered
# parameters and optimizer state need memory too.
SHARE_OF_FREE_MEMORY = 0.25


class AccumulationChoice(NamedTuple):
    """Where gradients are accumulated.

    Attributes:
        place: "sharded", "unsharded" or "hybrid", as in `ShardingConfig.accumulate`.
        reason: Why it was chosen, as text for the log.
    """

    place: Place
    reason: str


def choose(
    requested: Accumulation,
    policy: PrecisionPolicy,
    *,
    elements: int,
    free_bytes: int,
    replicas: int = 1,
    microbatches: int | None = None,
) -> AccumulationChoice:
    """Return where to accumulate gradients; the same on every rank.

    One reduction per step causes the least communication, and needs FP32 gradients of the full
    model on every rank. If they do not fit in memory, every microbatch is reduced. With several
    copies of the model, only the reduction within a shard group runs in every microbatch.

    Args:
        requested: "auto", or the configured value.
        policy: The precision policy.
        elements: Number of elements of all trainable parameters of the full model.
        free_bytes: Smallest free memory of any rank, in bytes.
        replicas: Number of copies of the model.
        microbatches: Number of microbatches of a step on one rank; None if unknown.

    Raises:
        ConfigError: If the requested accumulation would not be in FP32.
    """
    frequent: Place = "hybrid" if replicas > 1 else "sharded"
    if policy.param_dtype != torch.float32:
        # FSDP rounds a reduced gradient to the dtype of the weights.
        in_fp32: Place = "hybrid" if replicas > 1 else "unsharded"
        if requested == "sharded" and microbatches != 1:
            raise ConfigError(
                "sharding.accumulate",
                requested,
                "accumulates in the dtype of the weights, which is not FP32 in this policy; use "
                f"{in_fp32!r} or a policy with param=fp32",
            )
        if requested == "auto":
            return AccumulationChoice(in_fp32, "FP32 sums for 16-bit weights")
    if requested != "auto":
        return AccumulationChoice(requested, "configured")
    if microbatches == 1:
        return AccumulationChoice("sharded", "a step has one microbatch")
    if policy.module_dtype.itemsize <= policy.reduce_dtype.itemsize < 4:
        return AccumulationChoice(
            frequent,
            "gradients of one microbatch lose nothing in 16-bit communication, a sum of several "
            "would",
        )
    share = f"{bytes_text(4 * elements)} of {bytes_text(free_bytes)} free memory"
    if 4 * elements > SHARE_OF_FREE_MEMORY * free_bytes:
        return AccumulationChoice(frequent, f"the full FP32 gradients would take {share}")
    return AccumulationChoice("unsharded", f"the full FP32 gradients take {share}")


def least_free_bytes(world: World) -> int:
    """Return the smallest free memory of any rank, in bytes; every rank has to call it."""
    if world.device.type == "cuda":
        # Including what torch's allocator holds but does not use.
        cached = torch.cuda.memory_reserved(world.device)
        cached -= torch.cuda.memory_allocated(world.device)
        free = torch.cuda.mem_get_info(world.device)[0] + cached
    else:
        free = free_host_bytes() // local_world_size(world.world_size)
    if world.group is None:
        return free
    least = torch.tensor(free, device=world.device)
    dist.all_reduce(least, dist.ReduceOp.MIN, world.group)
    return int(least)
