"""Measures the errors of matmuls of a run in low-precision formats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from distmp.commands.calibrate.policies import started
from distmp.commands.explain.types import group_name
from distmp.commands.tables import counted, text_table
from distmp.config import RunConfig
from distmp.diagnosis.product_errors import PRODUCTS, Candidate, ProductError, ProductErrors
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.blocks import find_blocks, outermost
from distmp.precision import PRESETS, PolicyLike, PrecisionPolicy, resolve
from distmp.quantization.layers import product_formats
from distmp.quantization.selection import select
from distmp.training.setup import RunComponents, prepare, training_batches
from distmp.training.strategy_choice import choose_strategy


@dataclass(frozen=True)
class FormatCalibration:
    """The measurements of a run.

    Attributes:
        steps: Number of steps, the measured one included.
        microbatches: Number of measured microbatches on each rank.
        world_size: Number of ranks.
        wide: Name of the policy with 16 bits.
        errors: The errors of forward, grad and wgrad by format and layer.
        refused: Why a format cannot be used for the model, by name.
    """

    steps: int
    microbatches: int
    world_size: int
    wide: str
    errors: dict[str, dict[str, list[ProductError]]]
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
    candidates, refused = _candidates(config, parts, wide, formats)
    engine, progress = started(config, parts, world, wide)
    with closing(training_batches(config, parts, world, progress)) as batches:
        for _ in range(steps - 1):
            engine.step(next(batches))
        batch = next(batches)
    with ProductErrors(candidates, world.device) as recorder:
        engine.step(batch)
    errors = recorder.errors(world.group)
    return FormatCalibration(steps, len(batch), world.world_size, wide.name, errors, refused)


def wide_policy(configured: PolicyLike, device: torch.device) -> PrecisionPolicy:
    """Return the configured policy with all products in bfloat16, or the preset `bf16`."""
    resolved, _ = resolve(configured, device)
    if resolved.compute_dtype != torch.bfloat16:
        return PRESETS["bf16"]
    if not resolved.is_narrow:
        return resolved
    formats = {"forward_format": None, "grad_format": None, "wgrad_format": None}
    return replace(resolved, **formats, scaling="tensor", hp=(), name="bf16")  # type: ignore[arg-type]


def narrow_policy(wide: PrecisionPolicy, preset: str) -> PrecisionPolicy:
    """Return the policy with the narrow products of a preset, and the other fields of `wide`."""
    of = PRESETS[preset]
    return replace(
        wide,
        forward_format=of.forward_format,
        grad_format=of.grad_format,
        wgrad_format=of.wgrad_format,
        scaling=of.scaling,
        hp=of.hp,
        name=preset,
    )


def _candidates(
    config: RunConfig, parts: RunComponents, wide: PrecisionPolicy, formats: Sequence[str]
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the formats and the layers of each preset, and why others cannot be used."""
    blocks = [*outermost(find_blocks(parts.model, config.sharding.wrap))]
    found, refused = {}, {}
    for name in formats:
        policy = narrow_policy(wide, name)
        try:
            layers = select(parts.model, policy, blocks).narrow
            found[name] = Candidate(product_formats(policy), layers)
        except ConfigError as error:
            refused[name] = str(error)
    if not found:
        name, reason = next(iter(refused.items()))
        raise ConfigError("policies", name, reason)
    return found, refused


def report(found: FormatCalibration) -> Iterator[str]:
    """Yield the lines of a table for each format."""
    yield (
        f"{counted(found.steps, 'step')} on {counted(found.world_size, 'rank')}, precision "
        f"{found.wide}; the last one is measured ({counted(found.microbatches, 'microbatch')} on "
        "each rank)"
    )
    yield (
        "error: norm of the difference from the FP32 product of the same operands, divided by the "
        "norm of that product; the largest of the layers"
    )
    for name, layers in found.errors.items():
        groups: dict[str, list[list[ProductError]]] = {}
        for layer, errors in layers.items():
            groups.setdefault(group_name(layer), []).append(errors)
        rows: list[tuple[str, ...]] = [(name, "layers", *PRODUCTS, "saturated", "underflowed")]
        rows += [(group, *_cells(each)) for group, each in groups.items()]
        yield from ("", *text_table(rows, right=range(1, 7)))
    for name, reason in found.refused.items():
        yield f"{name} cannot be used: {reason}"


def _cells(layers: Sequence[Sequence[ProductError]]) -> Iterator[str]:
    yield str(len(layers))
    for products in zip(*layers, strict=True):
        known = [one.error for one in products if one.error is not None]
        yield f"{max(known):.4f}" if known else "-"
    for share in ("saturated", "underflowed"):
        yield f"{max(getattr(one, share) for each in layers for one in each):.2%}"


def as_json(found: FormatCalibration) -> dict[str, Any]:
    """Return all measurements as JSON values; infinite errors and NaN as text."""

    def values(one: ProductError) -> dict[str, Any]:
        finite = one.error is None or math.isfinite(one.error)
        return one._replace(error=one.error if finite else str(one.error))._asdict()  # type: ignore[arg-type]

    errors = {
        name: {
            layer: {product: values(one) for product, one in zip(PRODUCTS, products, strict=True)}
            for layer, products in layers.items()
        }
        for name, layers in found.errors.items()
    }
    return {**vars(found), "errors": errors}
