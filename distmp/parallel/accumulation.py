"""Where a sharded strategy adds up the gradients of microbatches, and why there."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist

from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.settings import Accumulation

Place = Literal["sharded", "unsharded", "hybrid"]

# Of the free memory, how much FP32 gradients of the whole model may take: activations, gathered
# parameters and the optimizer's state want some too.
SHARE_OF_FREE_MEMORY = 0.25


class AccumulationChoice(NamedTuple):
    """A place, and in words why it was chosen."""

    place: Place
    reason: str


class AccumulationMemory(NamedTuple):
    """What the choice depends on; the same on every rank.

    Attributes:
        elements: Trainable parameters of the whole model.
        free_bytes: Free memory of the rank that has least.
        shard_size: Ranks that share one copy of the model.
        replicas: Copies of the model.
        gradient_bytes: Bytes of an element of the gradient of one microbatch.
        wire_bytes: Bytes of an element in a reduction among the ranks of a shard group.
        weight_bytes: Bytes of an element of the weights that the optimizer steps.
        microbatches: Microbatches of a step; None if that is not known.
    """

    elements: int
    free_bytes: int
    shard_size: int
    replicas: int
    gradient_bytes: int
    wire_bytes: int
    weight_bytes: int
    microbatches: int | None


def choose(wanted: Accumulation, memory: AccumulationMemory) -> AccumulationChoice:
    """Return where gradients are accumulated.

    One reduction per step is the least traffic, and needs FP32 gradients of the whole model on
    every rank. Without the memory for it every microbatch is reduced; with several copies of the
    model at least their own reduction waits for the last microbatch.

    Args:
        wanted: "auto", or the place to take.
        memory: What it depends on.

    Raises:
        ConfigError: If the place that is wanted is not FP32 there.
    """
    hybrid = memory.replicas > 1
    if memory.weight_bytes < 4:
        # FSDP rounds a reduced gradient to the type of the weights.
        if wanted == "sharded" and memory.microbatches != 1:
            raise ConfigError(
                "sharding.accumulate",
                wanted,
                "adds up in the type of the weights, and the policy's are not FP32; use "
                f"'{'hybrid' if hybrid else 'unsharded'}' or a policy with param=fp32",
            )
        if wanted == "auto":
            return AccumulationChoice(
                "hybrid" if hybrid else "unsharded", "FP32 sums for 16-bit weights"
            )
    if wanted != "auto":
        return AccumulationChoice(wanted, "configured")
    if memory.microbatches == 1:
        return AccumulationChoice("sharded", "a step is one microbatch")
    frequent: Place = "hybrid" if hybrid else "sharded"
    if memory.gradient_bytes <= memory.wire_bytes < 4:
        bits = 8 * memory.wire_bytes
        return AccumulationChoice(
            frequent,
            f"of one microbatch they lose nothing in {bits} bits on the wire, a sum of several "
            "would",
        )
    whole = 4 * memory.elements
    share = f"{_size(whole)} of {_size(memory.free_bytes)} of free memory"
    if whole > SHARE_OF_FREE_MEMORY * memory.free_bytes:
        return AccumulationChoice(frequent, f"whole in FP32 they would take {share}")
    once, often = (_size(bytes_per_step(place, memory)) for place in ("unsharded", frequent))
    per = "microbatch" if memory.microbatches is None else "step"
    return AccumulationChoice(
        "unsharded",
        f"a rank sends {once} per step instead of {often} per {per}; whole in FP32 they take "
        f"{share}",
    )


def bytes_per_step(place: str, memory: AccumulationMemory) -> int:
    """Return what a rank sends to reduce the gradients of a step, as ring algorithms do it.

    Without a known number of microbatches: of a step with one.
    """
    microbatches = memory.microbatches or 1
    scatter = memory.elements * memory.wire_bytes * (memory.shard_size - 1) // memory.shard_size
    # FP32, of this rank's shard, there and back.
    shard = memory.elements // memory.shard_size
    across = 2 * 4 * shard * (memory.replicas - 1) // memory.replicas
    scatters = 1 if place == "unsharded" else microbatches
    return scatters * scatter + (microbatches if place == "sharded" else 1) * across


def least_free_bytes(world: World) -> int:
    """Return the free memory of the rank that has least; every rank has to call it."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
    else:
        free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    least = torch.tensor(free, device=world.device)
    if world.group is not None:
        dist.all_reduce(least, dist.ReduceOp.MIN, world.group)
    return int(least)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
