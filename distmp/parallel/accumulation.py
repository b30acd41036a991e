"""Where a sharded strategy adds up the gradients of microbatches, and why there."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist

from distmp.parallel.settings import Accumulation
from distmp.parallel.world import World

Place = Literal["sharded", "unsharded", "hybrid"]

# Of the free memory, how much FP32 gradients of the whole model may take: activations, gathered
# parameters and the optimizer's state want some too.
SHARE_OF_FREE_MEMORY = 0.25
GIGABYTE = 1e9


class Choice(NamedTuple):
    """A place, and in words why it was chosen."""

    place: Place
    reason: str


class Facts(NamedTuple):
    """What the choice depends on; the same on every rank.

    Attributes:
        elements: Trainable parameters of the whole model.
        free_bytes: Free memory of the rank that has least.
        shard_size: Ranks that share one copy of the model.
        replicas: Copies of the model.
        wire_bytes: Bytes of an element in a reduction among the ranks of a shard group.
        lossless_wire: Whether the gradients of a microbatch have no more bits than are sent.
        microbatches: Microbatches of a step; None if that is not known.
    """

    elements: int
    free_bytes: int
    shard_size: int
    replicas: int
    wire_bytes: int
    lossless_wire: bool
    microbatches: int | None


def choose(wanted: Accumulation, facts: Facts) -> Choice:
    """Return where gradients are accumulated.

    One reduction per step is the least traffic, and needs FP32 gradients of the whole model on
    every rank. Without the memory for it every microbatch is reduced; with several copies of the
    model at least their own reduction waits for the last microbatch.

    Args:
        wanted: "auto", or the place to take.
        facts: What it depends on.
    """
    if wanted != "auto":
        return Choice(wanted, "configured")
    if facts.microbatches == 1:
        return Choice("sharded", "a step is one microbatch")
    per_microbatch: Place = "hybrid" if facts.replicas > 1 else "sharded"
    if facts.wire_bytes < 4 and facts.lossless_wire:
        return Choice(
            per_microbatch,
            f"gradients of one microbatch lose nothing in {8 * facts.wire_bytes} bits on the wire, "
            "the sum of several would",
        )
    whole = 4 * facts.elements
    free = f"{whole / GIGABYTE:.3g} GB of {facts.free_bytes / GIGABYTE:.3g} GB free memory"
    if whole > SHARE_OF_FREE_MEMORY * facts.free_bytes:
        return Choice(per_microbatch, f"FP32 gradients of the whole model would take {free}")
    once = bytes_per_step("unsharded", facts) / GIGABYTE
    often = bytes_per_step(per_microbatch, facts) / GIGABYTE
    return Choice(
        "unsharded",
        f"a rank sends {once:.3g} GB to reduce once per step, {often:.3g} GB to reduce "
        f"{'one' if facts.microbatches is None else f'each of {facts.microbatches}'} microbatch"
        f"{'' if facts.microbatches is None else 'es'}; FP32 gradients of the whole model take "
        f"{free}",
    )


def bytes_per_step(place: Place, facts: Facts) -> int:
    """Return what a rank sends to reduce the gradients of a step, as ring algorithms do it.

    Without a known number of microbatches: of a step with one.
    """
    microbatches = facts.microbatches or 1
    scatter = facts.elements * facts.wire_bytes * (facts.shard_size - 1) // facts.shard_size
    # FP32, of this rank's shard, there and back.
    shard = facts.elements // facts.shard_size
    across = 2 * 4 * shard * (facts.replicas - 1) // facts.replicas
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
