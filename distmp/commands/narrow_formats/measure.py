"""Measures the products and the weight gradients of a run under narrow formats."""

# Note [What is compared]
#
# A run takes some steps in bfloat16, so that gradients are those of training. From the same weights
# it takes one more step on the same batch in FP32, in bfloat16, and under each candidate. The
# errors of single products are those of the step in bfloat16, with its operands. The gradients show
# what they add up to: those of each candidate, and of bfloat16, are compared with those in FP32.

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distmp.commands.gradient_range import for_one_process
from distmp.config import RunConfig
from distmp.diagnosis.product_errors import Candidate, ProductError, ProductErrors
from distmp.diagnosis.weight_gradients import GradientMatch, WeightGradients
from distmp.distributed.world import World
from distmp.engine import Engine
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
        gradients: The weight gradient of each layer compared with FP32.
        gradient: That of all layers together.
    """

    policy: PrecisionPolicy
    products: dict[str, list[ProductError]]
    gradients: dict[str, GradientMatch]
    gradient: GradientMatch


class FormatCalibration(NamedTuple):
    """The measurements of a run.

    Attributes:
        steps: Number of steps, the measured one included.
        microbatches: Number of measured microbatches on each rank.
        world_size: Number of ranks.
        wide: The policy with 16 bits.
        layers: Names of all linear layers.
        results: The measurements by format, the cheapest first.
        wide_gradient: The weight gradient of all layers in 16 bits compared with FP32.
        refused: Why a format cannot be used for the model, by name.
    """

    steps: int
    microbatches: int
    world_size: int
    wide: PrecisionPolicy
    layers: tuple[str, ...]
    results: dict[str, FormatResult]
    wide_gradient: GradientMatch
    refused: dict[str, str]


class _Run(NamedTuple):
    """A run whose state can be loaded into engines with other policies."""

    config: RunConfig
    world: World

    def engine(self, policy: PolicyLike, parts: RunComponents | None = None) -> Engine:
        """Build an engine; every rank has to call it."""
        parts = parts or self.prepare()
        return self.world.ranks.all_or_none(
            lambda: build_engine(self.config, parts, self.world, policy=policy, attribution=False)
        )

    def prepare(self) -> RunComponents:
        """Build data and model; every rank has to call it."""
        return self.world.ranks.all_or_none(lambda: prepare(self.config, self.world))


def measure_formats(
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
    if world.group is None:
        config = for_one_process(config)
    # Compiled layers do not run hooks.
    config = replace(config.with_fixed_formats(), compile="none")
    parts = world.ranks.all_or_none(lambda: prepare(config, world))
    config, _ = choose_strategy(config, parts, world)
    wide = wide_policy(config.precision.policy, world.device)
    selections, refused = _selections(config, parts, wide, formats)
    run = _Run(config, world)
    engine, batches = _trained(run, parts, wide, steps - 1)
    with closing(batches):
        batch = next(batches)
    state = engine.state_dict()
    layers = _layers(selections)
    exact = _gradients(run, PRESETS["fp32"], state, batch, [*layers])
    matches = {
        name: _gradients(run, policy, state, batch, [*layers]).match(
            exact, world.group, world.device
        )
        for name, (policy, _) in selections.items()
    }
    candidates = {
        name: Candidate(product_formats(policy), selection.narrow)
        for name, (policy, selection) in selections.items()
    }
    with ProductErrors(candidates, world.device) as recorder, WeightGradients(layers) as gradients:
        torch.manual_seed(config.seed)
        engine.step(batch)
    errors = recorder.errors(world.group)
    return FormatCalibration(
        steps,
        len(batch),
        world.world_size,
        wide,
        tuple(_all_linear(selections)),
        {
            name: FormatResult(policy, errors[name], *matches[name])
            for name, (policy, _) in selections.items()
        },
        gradients.match(exact, world.group, world.device)[1],
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
        raise ConfigError("formats", name, reason)
    return found, refused


def _trained(run: _Run, parts: RunComponents, wide: PrecisionPolicy, steps: int) -> Any:
    """Return an engine after some steps from the start or a checkpoint, and the batches."""
    checkpoint = run.world.ranks.all_or_none(lambda: find_checkpoint(run.config))
    engine = run.engine(wide, parts)
    progress = Progress()
    if checkpoint is None:
        start_from_weights(parts, engine)
    else:
        progress = run.world.ranks.all_or_none(lambda: restore(engine, checkpoint))
    batches = training_batches(run.config, parts, run.world, progress)
    for _ in range(steps):
        engine.step(next(batches))
    return engine, batches


def _gradients(
    run: _Run, policy: PrecisionPolicy, state: Any, batch: Any, names: Sequence[str]
) -> WeightGradients:
    """Return the gradients of some layers in a step from `state` under a policy."""
    parts = run.prepare()
    modules = dict(parts.model.named_modules())
    engine = run.engine(policy, parts)
    engine.load_state_dict(state)
    with WeightGradients({name: modules[name] for name in names}) as gradients:
        torch.manual_seed(run.config.seed)
        engine.step(batch)
    return gradients


def _layers(selections: dict[str, tuple[PrecisionPolicy, Selection]]) -> dict[str, Any]:
    """Return the layers that any format makes narrow, by name."""
    return {
        name: layer
        for _, selection in selections.values()
        for name, layer in selection.narrow.items()
    }


def _all_linear(selections: dict[str, tuple[PrecisionPolicy, Selection]]) -> list[str]:
    _, selection = next(iter(selections.values()))
    return [*selection.narrow, *selection.wide]
