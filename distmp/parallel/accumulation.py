"""Chooses where a sharded strategy accumulates gradients of microbatches."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from distmp.distributed.rank_environment import local_world_size
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.settings import Accumulation
from distmp.utils.cgroups import free_host_bytes
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


class AccumulationMemory(NamedTuple):
    """Sizes that the choice depends on; the same on every rank.

    Attributes:
        elements: Number of elements of all trainable parameters of the full model.
        free_bytes: Smallest free memory of any rank, in bytes.
        shard_size: Number of ranks that share one copy of the model.
        replicas: Number of copies of the model.
        gradient_bytes: Bytes per element of the gradients of one microbatch.
        comm_bytes: Bytes per element of a reduction within a shard group.
        weight_bytes: Bytes per element of the weights that the optimizer steps.
        microbatches: Number of microbatches of a step on one rank; None if unknown.
    """

    elements: int
    free_bytes: int
    shard_size: int
    replicas: int
    gradient_bytes: int
    comm_bytes: int
    weight_bytes: int
    microbatches: int | None


def choose(requested: Accumulation, memory: AccumulationMemory) -> AccumulationChoice:
    """Return where to accumulate gradients.

    One reduction per step causes the least communication, and needs FP32 gradients of the full
    model on every rank. If they do not fit in memory, every microbatch is reduced. With several
    copies of the model, only the reduction within a shard group runs in every microbatch.

    Args:
        requested: "auto", or the configured value.
        memory: The sizes that the choice depends on.

    Raises:
        ConfigError: If the requested accumulation would not be in FP32.
    """
    hybrid = memory.replicas > 1
    if memory.weight_bytes < 4:
        # FSDP rounds a reduced gradient to the dtype of the weights.
        if requested == "sharded" and memory.microbatches != 1:
            raise ConfigError(
                "sharding.accumulate",
                requested,
                "accumulates in the dtype of the weights, which is not FP32 in this policy; use "
                f"'{'hybrid' if hybrid else 'unsharded'}' or a policy with param=fp32",
            )
        if requested == "auto":
            return AccumulationChoice(
                "hybrid" if hybrid else "unsharded", "FP32 sums for 16-bit weights"
            )
    if requested != "auto":
        return AccumulationChoice(requested, "configured")
    if memory.microbatches == 1:
        return AccumulationChoice("sharded", "a step has one microbatch")
    frequent: Place = "hybrid" if hybrid else "sharded"
    if memory.gradient_bytes <= memory.comm_bytes < 4:
        bits = 8 * memory.comm_bytes
        return AccumulationChoice(
            frequent,
            f"gradients of one microbatch lose nothing in {bits}-bit communication, a sum of "
            "several would",
        )
    full = 4 * memory.elements
    share = f"{bytes_text(full)} of {bytes_text(memory.free_bytes)} free memory"
    if full > SHARE_OF_FREE_MEMORY * memory.free_bytes:
        return AccumulationChoice(frequent, f"the full FP32 gradients would take {share}")
    fits = f"the full FP32 gradients take {share}"
    if memory.shard_size * memory.replicas == 1:
        return AccumulationChoice("unsharded", fits)
    once, often = (bytes_text(bytes_per_step(place, memory)) for place in ("unsharded", frequent))
    per = "microbatch" if memory.microbatches is None else "step"
    return AccumulationChoice(
        "unsharded",
        f"a rank sends {once} per step instead of {often} per {per}; {fits}",
    )


def bytes_per_step(place: str, memory: AccumulationMemory) -> int:
    """Return how many bytes a rank sends to reduce the gradients of a step with ring algorithms.

    If the number of microbatches is unknown, it counts one.
    """
    microbatches = memory.microbatches or 1
    scatter = memory.elements * memory.comm_bytes * (memory.shard_size - 1) // memory.shard_size
    # An FP32 all-reduce of this rank's shard.
    shard = memory.elements // memory.shard_size
    across = 2 * 4 * shard * (memory.replicas - 1) // memory.replicas
    scatters = 1 if place == "unsharded" else microbatches
    return scatters * scatter + (microbatches if place == "sharded" else 1) * across


def least_free_bytes(world: World) -> int:
    """Return the smallest free memory of any rank, in bytes; every rank has to call it."""
    if world.device.type == "cuda":
        free = _free_cuda_bytes(world.device)
    else:
        free = free_host_bytes() // local_world_size(world.world_size)
    if world.group is None:
        return free
    least = torch.tensor(free, device=world.device)
    dist.all_reduce(least, dist.ReduceOp.MIN, world.group)
    return int(least)


def _free_cuda_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, including what torch's allocator holds but does not use."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
