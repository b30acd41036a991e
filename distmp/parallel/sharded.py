"""Checks of models and settings that only strategies with shards make."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from distmp.distributed.rank_environment import local_world_size
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.settings import ShardingConfig
from distmp.parallel.strategy import parameter_name, refuse_shared_memory

HOOK = (
    "has a hook (Tensor.register_hook), which FSDP would not run, because it computes gradients of "
    "gathered copies; change engine.gradients() in a step pre-hook of the optimizer, or use 'ddp'"
)


def shard_size(sharding: ShardingConfig, world: World) -> int:
    """Return how many ranks share one copy of the model with `hsdp`.

    Raises:
        ConfigError: If it does not divide the number of ranks.
    """
    local = local_world_size(world.world_size)
    size = local if sharding.shard_size is None else sharding.shard_size
    if world.world_size % size:
        divisors = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
        raise ConfigError(
            "sharding.shard_size",
            size,
            f"does not divide the {world.world_size} ranks; use one of "
            f"{', '.join(map(str, divisors))}",
        )
    return size


def check_shapes(module: nn.Module, strategy: str) -> None:
    """Refuse parameters that a sharded strategy cannot divide.

    Raises:
        ConfigError: For a scalar, a trainable parameter without elements, and two parameters that
            share memory, or a hook that would not run.
    """
    refuse_shared_memory(module, "strategy", strategy)
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError("model", name, HOOK)
        if parameter.dim() == 0:
            raise ConfigError(
                "strategy",
                strategy,
                f"shards parameters by rows, but {name!r} has the shape (); give it the shape "
                "(1,), or use 'ddp'",
            )
        if parameter.numel() == 0 and parameter.requires_grad:
            raise ConfigError(
                "strategy",
                strategy,
                f"cannot shard {name!r} of shape {tuple(parameter.shape)}, which has no elements; "
                "freeze or remove it, or use 'ddp'",
            )


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
        ties: What `tied_names` returned before.
        strategy: The name of the strategy.

    Raises:
        ConfigError: If two names of a parameter are two parameters now.
    """
    named = module.named_parameters(remove_duplicate=False)
    sharded = {parameter_name(name): parameter for name, parameter in named}
    for first, *others in ties:
        for name in others:
            if sharded[name] is not sharded[first]:
                raise ConfigError(
                    "strategy",
                    strategy,
                    f"shards each block by itself, but {first!r} and {name!r} are one parameter; "
                    "use 'ddp', with shard_optimizer to save memory, or name a module that "
                    "contains and calls both in sharding.wrap",
                )
