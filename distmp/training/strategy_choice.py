"""Chooses the strategy of a run with `strategy: auto` from the size of the model."""

from __future__ import annotations

from dataclasses import replace

from distmp.config import Config, RunConfig
from distmp.distributed.world import World
from distmp.errors import ConfigError, require
from distmp.parallel.fsdp_setup import check_shapes, least_free_bytes, shard_size
from distmp.parallel.replicated import check_buckets
from distmp.precision import PrecisionPolicy, resolve
from distmp.training.components import ModelAndData
from distmp.utils.units import bytes_text

# From the fastest to the one that needs the least memory.
OPTIONS = ("ddp", "hsdp", "fsdp")
# Share of the free memory for weights, gradients and optimizer state. Activations need the rest.
SHARE = 0.5


def choose_strategy(config: Config, parts: ModelAndData, world: World) -> tuple[Config, str]:
    """Resolve `strategy: auto` for several ranks. Collective over all ranks.

    Returns:
        The configuration with a strategy, and why it was chosen; empty if it was configured.

    Raises:
        ConfigError: If no strategy supports all settings.
    """
    if config.strategy != "auto" or world.world_size == 1:
        return config, ""
    policy, _ = resolve(config.precision.policy, world.device)
    free = least_free_bytes(world)
    options = _supported(config, parts, policy, world)
    needs = {option: _bytes_of_rank(option, config, parts, policy, world) for option in options}
    chosen = next((each for each in options if needs[each] <= SHARE * free), options[-1])
    numbers = ", ".join(f"{each} {bytes_text(needs[each])}" for each in options)
    reason = (
        f"auto: weights, gradients and optimizer state of a rank take: {numbers}; "
        f"limit: {SHARE:.0%} of the {bytes_text(free)} that are free for a rank"
    )
    return replace(config, strategy=chosen), reason


def _supported(
    config: RunConfig, parts: ModelAndData, policy: PrecisionPolicy, world: World
) -> list[str]:
    """Return the strategies that support the settings, the fastest first."""
    options, refusals = [], []
    for option in OPTIONS:
        try:
            _check(option, config, parts, policy, world)
            options.append(option)
        except ConfigError as error:
            refusals.append(error)
    if not options:
        raise refusals[0]
    return options


def _check(
    option: str, config: RunConfig, parts: ModelAndData, policy: PrecisionPolicy, world: World
) -> None:
    """Refuse a strategy that the settings, the model or the machines exclude."""
    settings = replace(config, strategy=option).engine(parts.microbatches)
    if option == "ddp":
        check_buckets(policy, settings)
        return
    of_a_machine = option == "hsdp" and config.sharding.shard_size is None
    valid = not of_a_machine or 1 < shard_size(config.sharding, world) < world.world_size
    hint = "needs several machines with several ranks each; use fsdp"
    require(valid, "strategy", "hsdp", hint)
    check_shapes(parts.model, option)


def _bytes_of_rank(
    option: str, config: RunConfig, parts: ModelAndData, policy: PrecisionPolicy, world: World
) -> int:
    """Return the bytes of weights, FP32 gradients and two FP32 moments for each weight."""
    parameters = [*parts.model.parameters()]
    elements = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    gradients, moments = 4 * trained, 8 * trained
    if option == "ddp":
        updated = moments + (4 * trained if policy.has_masters else 0)
        ranks = world.world_size if config.shard_optimizer else 1
        return policy.module_dtype.itemsize * elements + gradients + updated // ranks
    shards = shard_size(config.sharding, world) if option == "hsdp" else world.world_size
    frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
    if config.model.peft is not None and policy.casts_parameters:  # see `round_frozen`
        frozen = policy.module_dtype.itemsize * (elements - trained)
    weights = policy.param_dtype.itemsize * trained + frozen
    return (weights + gradients + moments) // shards
