"""Divides a module into the groups that FSDP2 shards, and refuses what it cannot shard.

Chooses where gradients of microbatches are accumulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distmp.distributed.collectives import create_mesh
from distmp.distributed.rank_environment import local_world_size
from distmp.distributed.world import World
from distmp.errors import ConfigError, require
from distmp.parallel.blocks import find_blocks
from distmp.parallel.settings import Accumulation, ShardingConfig
from distmp.precision.builders import fsdp2_policy
from distmp.precision.keep import with_submodules
from distmp.precision.policy import PrecisionPolicy
from distmp.utils.processes import free_host_bytes
from distmp.utils.tensor_trees import parameter_name, refuse_shared_memory, tied_parameters
from distmp.utils.units import bytes_text

HOOK = (
    "has a hook (Tensor.register_hook), which FSDP would not run, because it computes gradients of "
    "gathered copies; change engine.gradients() in a step pre-hook of the optimizer, or use 'ddp'"
)


def shard_size(sharding: ShardingConfig, world: World) -> int:
    """Return how many ranks share one copy of the model with `hsdp`; all ranks have to call it.

    Raises:
        ConfigError: If it does not divide the number of ranks, or machines differ in theirs.
    """
    size = sharding.shard_size
    if size is None:
        size, *others = sorted({*world.ranks.gather(local_world_size(world.world_size))})
        problem = f"machines have different numbers of ranks, {[size, *others]}; set it"
        require(not others, "sharding.shard_size", None, problem)
    divisors = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
    choices = ", ".join(map(str, divisors))
    problem = f"does not divide the {world.world_size} ranks; use one of {choices}"
    require(size in divisors, "sharding.shard_size", size, problem)
    return size


def check_shapes(module: nn.Module, strategy: str) -> None:
    """Refuse parameters that a sharded strategy cannot divide.

    Raises:
        ConfigError: For a scalar, a trainable parameter without elements, and two parameters that
            share memory, a hook that would not run, or an embedding with sparse gradients.
    """
    refuse_shared_memory(module, "strategy", strategy)
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            problem = "has sparse gradients, which FSDP cannot reduce; use sparse=False, or 'ddp'"
            raise ConfigError("model", name, problem)
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError("model", name, HOOK)
        if parameter.dim() == 0:
            problem = (
                f"shards parameters by rows, but {name!r} has the shape (); give it the shape "
                "(1,), or use 'ddp'"
            )
        elif parameter.numel() == 0 and parameter.requires_grad:
            problem = (
                f"cannot shard {name!r} of shape {tuple(parameter.shape)}, which has no elements; "
                "freeze or remove it, or use 'ddp'"
            )
        else:
            continue
        raise ConfigError("strategy", strategy, problem)


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(parameter_name(name))
    return [tied for tied in names.values() if len(tied) > 1]


def check_ties(module: nn.Module, ties: list[list[str]], strategy: str) -> None:
    """Refuse a module whose blocks shared a parameter, which sharding has separated.

    Args:
        module: The module after it was sharded.
        ties: Result of `tied_names` before sharding.
        strategy: The name of the strategy.

    Raises:
        ConfigError: If two names of a parameter are two parameters now.
    """
    named = module.named_parameters(remove_duplicate=False)
    sharded = {parameter_name(name): parameter for name, parameter in named}
    for first, *others in ties:
        for name in others:
            problem = (
                f"shards each block by itself, but {first!r} and {name!r} are one parameter; use "
                "'ddp', with shard_optimizer to save memory, or name a module that contains and "
                "calls both in sharding.wrap"
            )
            require(sharded[name] is sharded[first], "strategy", strategy, problem)


def device_mesh(world: World, shards: int, strategy: str) -> DeviceMesh:
    """Return the mesh of a strategy: `shards` ranks, with `hsdp` in each copy of the model."""
    if strategy == "fsdp":
        return create_mesh(world.device, (shards,), ("shard",))
    shape = (world.world_size // shards, shards)
    return create_mesh(world.device, shape, ("replicate", "shard"))


def shard(
    module: nn.Module,
    policy: PrecisionPolicy,
    kept: Sequence[nn.Module],
    mesh: DeviceMesh,
    sharding: ShardingConfig,
) -> None:
    """Shard a module in groups.

    Groups are the blocks, the modules kept in FP32 within each block, the modules outside of blocks
    with an attribute `own_group = True`, and the rest. Such modules compute only in their forward:
    the embedding and the head, which are as large as several blocks. The head is reduced while
    backward continues, and blocks do not wait until it is gathered.

    Args:
        module: The model, sharded in place.
        policy: The precision policy.
        kept: Modules that the policy keeps in FP32.
        mesh: Result of `device_mesh`.
        sharding: The settings.
    """
    # FP32, because `ReduceScatter` converts to the communication dtype.
    computed = replace(
        fsdp2_policy(policy.high_precision, own_accumulator=True), reduce_dtype=torch.float32
    )
    fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    in_fp32 = with_submodules(kept)
    done: set[int] = set()

    def group(parts: list[nn.Module], reshard: bool | None) -> None:
        done.update(map(id, parts))
        fully_shard(
            parts[0] if len(parts) == 1 else parts,
            mesh=mesh,
            mp_policy=fp32 if id(parts[0]) in in_fp32 else computed,
            reshard_after_forward=reshard,
        )

    def group_kept(holder: nn.Module, reshard: bool) -> None:
        inside = with_submodules([holder])
        parts = [
            part
            for part in kept
            if id(part) in inside and id(part) not in done and any(True for _ in part.parameters())
        ]
        if parts and holder is not parts[0]:
            group(parts, reshard)

    # Inner modules first, as FSDP requires.
    for block in reversed(find_blocks(module, sharding.wrap).values()):
        group_kept(block, sharding.reshard_after_forward)
        group([block], sharding.reshard_after_forward)
    for part in _with_own_group(module, done):
        group_kept(part, reshard=False)
        group([part], False)
    # Not resharded, like the root: other modules may use these parameters (a tied head).
    group_kept(module, reshard=False)
    group([module], None)


def _with_own_group(module: nn.Module, done: set[int]) -> list[nn.Module]:
    """Return the modules with `own_group`, unless they are done or frozen, or share a weight."""
    tied = tied_parameters(module)
    inside = with_submodules([part for part in module.modules() if id(part) in done])
    return [
        part
        for part in module.modules()
        if getattr(part, "own_group", False)
        and id(part) not in inside
        and all(each.requires_grad and each not in tied for each in part.parameters())
    ]


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
        problem = (
            "accumulates in the dtype of the weights, which is not FP32 in this policy; use "
            f"{in_fp32!r} or a policy with param=fp32"
        )
        valid = requested != "sharded" or microbatches == 1
        require(valid, "sharding.accumulate", requested, problem)
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
    return min(world.ranks.gather(free))
