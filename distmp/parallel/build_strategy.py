"""Resolves and builds strategies by name."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from distmp.distributed.world import World
from distmp.errors import ConfigError, require
from distmp.parallel import settings
from distmp.parallel.blocks import find_blocks, prepare_blocks
from distmp.parallel.materialize import InitialValues, nothing_to_compute
from distmp.parallel.strategy import Strategy, check_parameters
from distmp.precision.keep import outermost
from distmp.precision.policy import PrecisionPolicy
from distmp.quantization.layers import low_precision_layers
from distmp.utils.tensor_trees import refuse_shared_memory


def resolve_strategy(name: str, world: World) -> str:
    """Resolve "auto" to `ddp` for several ranks and to `single` for one rank.

    Raises:
        ConfigError: If the name is unknown or does not support the number of ranks.
    """
    error = partial(ConfigError, "strategy", name)
    if name not in settings.STRATEGIES:
        raise error(settings.nearest_strategy(name))
    if name == "auto":
        return "ddp" if world.world_size > 1 else "single"
    if name == "single" and world.world_size > 1:
        raise error(f"is for one rank, but {world.world_size} were started; use 'ddp'")
    if name != "single" and world.world_size == 1 and world.group is None:
        raise error(
            "needs several ranks, but only one process was started; start it with torchrun or "
            "`distmp launch`, or use 'auto'"
        )
    return name


def build_strategy(
    name: str,
    module: nn.Module,
    policy: PrecisionPolicy,
    world: World,
    accumulation: settings.AccumulationSettings | None = None,
    config: settings.ParallelConfig | None = None,
    values: InitialValues = nothing_to_compute,
) -> Strategy:
    """Prepare a module for a strategy.

    Args:
        name: "single", "ddp", "fsdp" or "hsdp".
        module: The model, with FP32 or 16-bit parameters; it is changed in place.
        policy: The precision policy.
        world: The ranks to train on.
        accumulation: How the strategies single and ddp accumulate gradients and step the optimizer.
        config: How the model is sharded, recomputed and compiled.
        values: The initial values of parameters and buffers that are on the meta device.

    Raises:
        ConfigError: If module, policy, strategy and settings are not compatible.
    """
    accumulation = accumulation or settings.AccumulationSettings()
    config = config or settings.ParallelConfig()
    config.sharding.check(name)
    dtype, problem = policy.accumulate_dtype, "all strategies sum microbatches in FP32; use fp32"
    require(dtype == torch.float32, "precision.policy.accumulate", dtype, problem)
    check_parameters(module, policy)
    if name in settings.SHARDED_STRATEGIES:
        accumulation.refuse_for(name)
    unchanged = config.activation_checkpointing == config.compile == "none"
    problem = (
        "functions cannot be kept where blocks are compiled or recomputed; put the call into a "
        "module and keep that, or set compile and activation_checkpointing to none"
    )
    for function in policy.kept_functions:
        require(unchanged, "precision.policy.keep_fp32", f"{function}()", problem)
    trained = [each for each in module.parameters() if each.requires_grad]
    is_cast = policy.casts_parameters or any(each.dtype != torch.float32 for each in trained)
    if name not in settings.SHARDED_STRATEGIES and is_cast:
        refuse_shared_memory(module, "policy", policy.name)
    if accumulation.shard_optimizer:
        refuse_shared_memory(module, "shard_optimizer", "True")
    blocks: dict[str, nn.Module] = {}
    if policy.has_low_precision_matmuls:
        blocks = outermost(module, find_blocks(module, config.sharding.wrap))
    low_precision = low_precision_layers(module, policy, [*blocks], world.device)
    prepare_blocks(module, config, quiet=world.rank > 0)
    strategy: Strategy
    # Import lazily: importing FSDP takes half a second, and the other strategies do not need it.
    if name in settings.SHARDED_STRATEGIES:
        from distmp.parallel.fsdp import FullySharded

        strategy = FullySharded(module, policy, world, config, name, values)
    else:
        from distmp.parallel.replicated import Replicated

        strategy = Replicated(module, policy, world, accumulation, values)
    strategy.low_precision_layers = low_precision
    return strategy
