"""Counts the gradients of a few steps by their magnitude, and recommends a loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distmp.checkpoint import recovery
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import RunConfig
from distmp.diagnosis.histogram import ExponentHistogram
from distmp.diagnosis.replay import Probe
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.precision import PolicyLike, Resolution, policy, resolve
from distmp.scaling.settings import LossScaleConfig
from distmp.training import components
from distmp.training.components import ModelAndData, Progress
from distmp.training.run_directory import RunDirectory, existing_runs, latest_of
from distmp.training.strategy_choice import choose_strategy
from distmp.utils.units import counted, text_table

# Exponents of the loss scales in the table, besides the recommended one.
SCALE_EXPONENTS = (0, 3, 8, 12, 16, 20, 24)
# If a larger share of values underflows at the best scale, the report recommends bfloat16.
MAX_LOST_SHARE = 0.01


class Calibration(NamedTuple):
    """The measurements of a calibration.

    Attributes:
        steps: Number of steps.
        world_size: Number of ranks.
        policy: The precision policy of these steps, and the reason for it.
        gradients: Exponents of all gradients.
    """

    steps: int
    world_size: int
    policy: str
    gradients: ExponentHistogram


def measure(config: RunConfig, world: World, steps: int) -> Calibration:
    """Train for some steps and count gradients; every rank must call it.

    Writes no files and keeps no state of the training.

    Raises:
        DistmpError: On every rank, if a rank cannot use the configuration.
    """
    parts = world.ranks.all_or_none(lambda: components.build_model_and_data(config, world))
    config, _ = choose_strategy(config, parts, world)
    measured_in, reason = _policy(config.precision.policy, world.device)
    checkpoint = resumed(config)
    engine = components.build_engine(
        config, parts, world, policy=measured_in, attribution=False, load=checkpoint is not None
    )
    progress = start(parts, engine, checkpoint)
    # FSDP gathers the parameters of some modules before forward: all are watched.
    watched = [*engine.module.named_modules()]
    batches = components.training_batches(config, parts, world, progress)
    with closing(batches), Probe(engine.module, watched, activations=True) as recorded:
        for _ in range(steps):
            engine.step(next(batches).microbatches)
    name = f"{measured_in.name} ({reason})"
    return Calibration(steps, world.world_size, name, histogram(recorded, world))


def resumed(config: RunConfig) -> StoredCheckpoint | None:
    """Return the checkpoint that `resume` refers to, if any; every rank must call it."""
    if config.resume is None:
        return None
    runs = existing_runs(config.run_dir, config.checkpoint.path)
    run = latest_of(runs or [RunDirectory(Path(config.run_dir))])
    return recovery.resolve(config.resume, run.checkpoints)


def start(parts: ModelAndData, engine: Engine, checkpoint: StoredCheckpoint | None) -> Progress:
    """Load a checkpoint or, without one, the weights of a new run; every rank must call it."""
    if checkpoint is not None:
        return components.restore(engine, checkpoint)
    components.start_from_weights(parts, engine)
    return Progress()


def histogram(recorded: Probe, world: World) -> ExponentHistogram:
    """Return the sum of the counts of all ranks; every rank must call it."""
    of_ranks = world.ranks.gather(recorded.exponents.cpu())
    return ExponentHistogram(torch.stack(of_ranks).sum(0))


def _policy(configured: PolicyLike, device: torch.device) -> Resolution:
    """Return a policy for the measurement without loss scaling or overflows."""
    resolved, _ = resolve(configured, device)
    if resolved.loss_scale is None:
        return Resolution(resolved, "as configured; it has the exponent range of float32")
    reason = f"in place of {resolved.name}, whose range would hide values outside of it"
    return Resolution(policy("fp32"), reason)


def report(calibration: Calibration, rules: LossScaleConfig) -> Iterator[str]:
    """Yield the lines of the table and of the advice.

    Args:
        calibration: The measurements.
        rules: The configured limits of the loss scale.
    """
    found = calibration.gradients
    scale = found.recommended_scale()
    yield (
        f"{calibration.steps} steps on {counted(calibration.world_size, 'rank')}, precision "
        f"{calibration.policy}"
    )
    yield (
        "float16 represents 2^-24 to 65504, with full precision from 2^-14; the table counts the "
        "gradients of each microbatch on each rank, of parameters and activations, before loss "
        "scaling"
    )
    if found.infinite or found.nan:
        yield (
            f"{found.infinite + found.nan} gradients are infinite or NaN already in this "
            "precision: training diverges with any loss scale"
        )
    if scale is None:
        yield "no gradient is finite and nonzero; nothing to recommend"
        return
    rows: list[tuple[str, ...]] = [("loss scale", "zero", "subnormal", "infinite", "")]
    for exponent in sorted({*SCALE_EXPONENTS, _exponent(scale)}):
        mark = "recommended" if exponent == _exponent(scale) else ""
        rows.append((_power(exponent), *map(_percent, found.shares(exponent)), mark))
    yield from ("", *text_table(rows, right=range(1, 4)), "")
    yield from _advice(found, scale, rules)


def _advice(found: ExponentHistogram, scale: float, rules: LossScaleConfig) -> Iterator[str]:
    yield (
        f"recommended: precision.loss_scale.init = {scale:g} ({_power(_exponent(scale))}), or "
        f"loss_scale={scale:g} in a policy that fixes the loss scale; the largest gradient stays a "
        "factor of 8 or more below overflow"
    )
    if not rules.min_scale <= scale <= rules.max_scale:
        name = "min_scale" if scale < rules.min_scale else "max_scale"
        yield (
            f"precision.loss_scale.{name} = {getattr(rules, name):g} does not allow this init; set "
            f"it to {scale:g} as well"
        )
    lost = found.shares(_exponent(scale)).zero
    if lost > MAX_LOST_SHARE:
        yield (
            f"with it {_percent(lost)} of the gradients still become zero: their range is too wide "
            "for float16; use a bf16 policy"
        )


def as_json(calibration: Calibration) -> dict[str, Any]:
    """Return all measurements as JSON values."""
    found = calibration.gradients
    return {
        **calibration._asdict(),
        "gradients": dict(found.exponents),
        "infinite": found.infinite,
        "nan": found.nan,
        "recommended_scale": found.recommended_scale(),
    }


def _exponent(scale: float) -> int:
    return math.frexp(scale)[1] - 1


def _power(exponent: int) -> str:
    return "1" if exponent == 0 else f"2^{exponent}"


def _percent(share: float) -> str:
    if share == 0:
        return "0"
    return "<0.001%" if share < 1e-5 else f"{share:.3%}"
