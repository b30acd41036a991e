"""Chooses the strategy of a run with `strategy: auto` from the memory that it needs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from distmp.config import RunConfig
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.accumulation import least_free_bytes
from distmp.parallel.memory import ModelMemory, Option, model_memory
from distmp.parallel.replicated import check_buckets
from distmp.parallel.sharded import check_shapes, shard_size
from distmp.precision import PrecisionPolicy, resolve
from distmp.training.setup import RunComponents, round_frozen
from distmp.utils.units import bytes_text

logger = logging.getLogger("distmp")

Config = TypeVar("Config", bound=RunConfig)

# From the fastest to the one that needs the least memory.
OPTIONS = (Option("ddp"), Option("ddp", shard_optimizer=True), Option("hsdp"), Option("fsdp"))
# Share of the free memory that parameters, gradients and optimizer state may take. The rest is for
# activations, which no strategy shards, and for workspaces and fragments of the allocator.
SHARE = 0.5


class Choice(NamedTuple):
    """What `strategy: auto` has chosen.

    Attributes:
        option: The strategy.
        reason: Why, with the predicted memory, as text.
        fits: Whether it is predicted to fit in memory.
    """

    option: Option
    reason: str
    fits: bool = True


def choose_strategy(config: Config, parts: RunComponents, world: World) -> tuple[Config, str]:
    """Resolve `strategy: auto` for several ranks. Collective over all ranks.

    Returns:
        The configuration with a strategy, and why it was chosen; empty if it was configured.

    Raises:
        SetupError: On every rank, if no strategy supports all settings.
    """
    if config.strategy != "auto" or world.world_size == 1:
        return config, ""
    free = least_free_bytes(world)
    policy, _ = resolve(config.precision.policy, world.device)
    round_frozen(config, parts, policy)
    choice = world.ranks.from_rank_0(lambda: choose(config, parts, policy, world, free))
    if not choice.fits and world.rank == 0:
        logger.warning(
            "strategy = 'auto': no strategy is predicted to fit in memory (%s); use more ranks, or "
            "lower batch.microbatch_size",
            choice.reason,
        )
    return _with_option(config, choice.option), f"auto: {choice.reason}"


def choose(
    config: RunConfig, parts: RunComponents, policy: PrecisionPolicy, world: World, free: int
) -> Choice:
    """Return the fastest strategy that fits.

    Args:
        config: The configuration, with several ranks.
        parts: Data, model and loss.
        policy: The resolved policy.
        world: The ranks.
        free: Free memory of a rank, in bytes.

    Raises:
        ConfigError: If no strategy supports all settings.
    """
    options = _supported(config, parts, policy, world)
    memory = model_memory(parts.model, policy, config.sharding, averaged=config.ema.decay > 0)
    needs = {option: _of_rank(memory, option, config, policy, parts, world) for option in options}
    usable = SHARE * free
    fitting = [option for option in options if needs[option] <= usable]
    chosen = fitting[0] if fitting else min(needs, key=lambda option: needs[option])
    tried = [option for option in options[: options.index(chosen)] if option not in fitting]
    numbers = ", ".join(f"{option} {bytes_text(needs[option])}" for option in (*tried, chosen))
    reason = (
        f"without activations, a rank needs: {numbers}; limit: {SHARE:.0%} of the "
        f"{bytes_text(free)} that are free for a rank"
    )
    return Choice(chosen, reason, bool(fitting))


def _with_option(config: Config, option: Option) -> Config:
    """Return a configuration with a strategy in place of `auto`.

    Raises:
        ConfigError: If another setting excludes it.
    """
    return replace(config, strategy=option.strategy, shard_optimizer=option.shard_optimizer)


def _supported(
    config: RunConfig, parts: RunComponents, policy: PrecisionPolicy, world: World
) -> list[Option]:
    """Return the strategies that support the settings, the fastest first."""
    options, refusals = [], []
    for option in OPTIONS:
        if config.shard_optimizer and not option.shard_optimizer:
            continue
        try:
            _check(option, config, parts, policy, world)
            options.append(option)
        except ConfigError as error:
            refusals.append(error)
    if not options:
        raise refusals[0]
    return options


def _check(
    option: Option, config: RunConfig, parts: RunComponents, policy: PrecisionPolicy, world: World
) -> None:
    """Refuse a strategy that the settings, the model or the machines exclude."""
    accumulation = _with_option(config, option).engine(parts.microbatches).accumulation
    if option.strategy == "ddp":
        check_buckets(policy, accumulation)
        return
    of_a_machine = option.strategy == "hsdp" and config.sharding.shard_size is None
    if of_a_machine and shard_size(config.sharding, world) in (1, world.world_size):
        raise ConfigError(
            "strategy", "hsdp", "needs several machines with several ranks each; use fsdp"
        )
    check_shapes(parts.model, option.strategy)


def _of_rank(
    memory: ModelMemory,
    option: Option,
    config: RunConfig,
    policy: PrecisionPolicy,
    parts: RunComponents,
    world: World,
) -> int:
    """Return the predicted memory of a rank, in bytes."""
    if option.strategy == "ddp":
        accumulation = _with_option(config, option).engine(parts.microbatches).accumulation
        return memory.replicated(accumulation, world.world_size, parts.microbatches)
    shards, sharding = world.world_size, config.sharding
    if option.strategy == "hsdp":
        shards = shard_size(sharding, world)
    elif sharding.accumulate == "auto" and policy.param_dtype != torch.float32:
        sharding = replace(sharding, accumulate="unsharded")  # FP32 sums for 16-bit weights
    return memory.sharded(sharding, shards, parts.microbatches)
