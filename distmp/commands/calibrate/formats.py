"""Measures the errors of matmuls of a run in low-precision formats."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch

from distmp.config import RunConfig
from distmp.diagnosis.product_errors import Candidate, ProductError, ProductErrors
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.blocks import find_blocks, outermost
from distmp.precision import PRESETS, PolicyLike, PrecisionPolicy, resolve
from distmp.quantization.layers import product_formats
from distmp.quantization.selection import Selection, select
from distmp.training.setup import (
    Progress,
    RunComponents,
    build_engine,
    find_checkpoint,
    prepare,
    restore,
    start_from_weights,
    training_batches,
)
from distmp.training.strategy_choice import choose_strategy


class FormatResult(NamedTuple):
    """The measurements of one format.

    Attributes:
        policy: The policy with the format in all linear layers that the preset makes narrow.
        products: The errors of forward, grad and wgrad, by layer.
    """

    policy: PrecisionPolicy
    products: dict[str, list[ProductError]]


class FormatCalibration(NamedTuple):
    """The measurements of a run.

    Attributes:
        steps: Number of steps, the measured one included.
        microbatches: Number of measured microbatches on each rank.
        world_size: Number of ranks.
        wide: The policy with 16 bits.
        layers: Names of all linear layers.
        results: The measurements by format, the cheapest first.
        refused: Why a format cannot be used for the model, by name.
    """

    steps: int
    microbatches: int
    world_size: int
    wide: PrecisionPolicy
    layers: tuple[str, ...]
    results: dict[str, FormatResult]
    refused: dict[str, str]


def measure(
    config: RunConfig, world: World, steps: int, formats: Sequence[str]
) -> FormatCalibration:
    """Train for some steps and measure formats in the last one; every rank must call it.

    Writes no files and keeps no state of the training.

    Args:
        config: The run.
        world: The ranks.
        steps: Number of steps.
        formats: Names of presets with narrow products, the cheapest first.

    Raises:
        SetupError: On every rank, if a rank cannot use the configuration.
        ConfigError: If none of the formats can be used for the model.
    """
    # Compiled layers do not run hooks.
    config = replace(config, compile="none")
    parts = world.ranks.all_or_none(lambda: prepare(config, world))
    config, _ = choose_strategy(config, parts, world)
    wide = wide_policy(config.precision.policy, world.device)
    selections, refused = _selections(config, parts, wide, formats)
    candidates = {
        name: Candidate(product_formats(policy), selection.narrow)
        for name, (policy, selection) in selections.items()
    }
    checkpoint = world.ranks.all_or_none(lambda: find_checkpoint(config))
    engine = world.ranks.all_or_none(
        lambda: build_engine(config, parts, world, policy=wide, attribution=False)
    )
    progress = Progress()
    if checkpoint is None:
        start_from_weights(parts, engine)
    else:
        progress = world.ranks.all_or_none(lambda: restore(engine, checkpoint))
    with closing(training_batches(config, parts, world, progress)) as batches:
        for _ in range(steps - 1):
            engine.step(next(batches))
        batch = next(batches)
    with ProductErrors(candidates, world.device) as recorder:
        engine.step(batch)
    errors = recorder.errors(world.group)
    return FormatCalibration(
        steps,
        len(batch),
        world.world_size,
        wide,
        tuple(_all_linear(selections)),
        {name: FormatResult(policy, errors[name]) for name, (policy, _) in selections.items()},
        refused,
    )


def wide_policy(configured: PolicyLike, device: torch.device) -> PrecisionPolicy:
    """Return the configured policy with all products in bfloat16, or the preset `bf16`."""
    resolved, _ = resolve(configured, device)
    if resolved.compute_dtype != torch.bfloat16:
        return PRESETS["bf16"]
    if not resolved.is_narrow:
        return resolved
    wide = replace(
        resolved, forward_format=None, grad_format=None, wgrad_format=None, scaling="tensor", hp=()
    )
    return _named(wide, "bf16")


def narrow_policy(wide: PrecisionPolicy, preset: str) -> PrecisionPolicy:
    """Return the policy with the narrow products of a preset, and the other fields of `wide`."""
    of = PRESETS[preset]
    policy = replace(
        wide,
        forward_format=of.forward_format,
        grad_format=of.grad_format,
        wgrad_format=of.wgrad_format,
        scaling=of.scaling,
        hp=of.hp,
    )
    return _named(policy, preset)


def _named(policy: PrecisionPolicy, preset: str) -> PrecisionPolicy:
    """Name a policy like the preset that it equals, or after it."""
    same = replace(policy, name=preset)
    return same if same == PRESETS[preset] else replace(policy, name=f"calibrated-{preset}")


def _selections(
    config: RunConfig, parts: RunComponents, wide: PrecisionPolicy, formats: Sequence[str]
) -> tuple[dict[str, tuple[PrecisionPolicy, Selection]], dict[str, str]]:
    """Return the policy and the layers of each format, and why others cannot be used."""
    blocks = [*outermost(find_blocks(parts.model, config.sharding.wrap))]
    found, refused = {}, {}
    for name in formats:
        policy = narrow_policy(wide, name)
        try:
            found[name] = policy, select(parts.model, policy, blocks)
        except ConfigError as error:
            refused[name] = str(error)
    if not found:
        name, reason = next(iter(refused.items()))
        raise ConfigError("policies", name, reason)
    return found, refused


def _all_linear(selections: dict[str, tuple[PrecisionPolicy, Selection]]) -> list[str]:
    _, selection = next(iter(selections.values()))
    return [*selection.narrow, *selection.wide]
