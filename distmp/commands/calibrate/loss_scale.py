"""Counts the gradients of a few steps by their magnitude, and recommends a loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch

from distmp.config import RunConfig
from distmp.diagnosis.gradient_recorder import KINDS, GradientRecorder, Histograms
from distmp.diagnosis.histogram import ExponentHistogram
from distmp.distributed.world import World
from distmp.precision import PolicyLike, Resolution, policy, resolve
from distmp.scaling import LossScaleConfig
from distmp.training.setup import (
    Progress,
    build_engine,
    find_checkpoint,
    prepare,
    restore,
    start_from_weights,
    training_batches,
)
from distmp.training.strategy_choice import choose_strategy

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
        histograms: Histograms of gradients by kind and layer group.
    """

    steps: int
    world_size: int
    policy: str
    histograms: Histograms

    @property
    def total(self) -> ExponentHistogram:
        """Histogram of all gradients."""
        return _sum(self.of_kind(kind) for kind in KINDS)

    @property
    def groups(self) -> dict[str, ExponentHistogram]:
        """Histograms of both kinds of gradients together, by layer group."""
        names = dict.fromkeys(name for kind in KINDS for name in self.histograms[kind])
        return {
            name: _sum(
                self.histograms[kind][name] for kind in KINDS if name in self.histograms[kind]
            )
            for name in names
        }

    def of_kind(self, kind: str) -> ExponentHistogram:
        """Return the histogram of all gradients of one kind: parameters or activations."""
        return _sum(self.histograms[kind].values())


def measure(config: RunConfig, world: World, steps: int) -> Calibration:
    """Train for some steps and count gradients; every rank must call it.

    Writes no files and keeps no state of the training.

    Raises:
        SetupError: On every rank, if a rank cannot use the configuration.
    """
    parts = world.ranks.all_or_none(lambda: prepare(config, world))
    checkpoint = world.ranks.all_or_none(lambda: find_checkpoint(config))
    config, _ = choose_strategy(config, parts, world)
    measured_in, reason = _policy(config.precision.policy, world.device)
    engine = world.ranks.all_or_none(
        lambda: build_engine(
            config,
            parts,
            world,
            policy=measured_in,
            attribution=False,
            load=checkpoint is not None,
        )
    )
    progress = Progress()
    if checkpoint is None:
        start_from_weights(parts, engine)
    else:
        progress = world.ranks.all_or_none(lambda: restore(engine, checkpoint))
    batches = training_batches(config, parts, world, progress)
    with closing(batches), GradientRecorder(engine.module, world.device) as recorder:
        for _ in range(steps):
            engine.step(next(batches))
        histograms = recorder.histograms(world.group)
    description = f"{measured_in.name} ({reason})"
    return Calibration(steps, world.world_size, description, histograms)


def _policy(configured: PolicyLike, device: torch.device) -> Resolution:
    """Return a policy for the measurement without loss scaling or overflows."""
    resolved, _ = resolve(configured, device)
    if resolved.loss_scale is None:
        return Resolution(resolved, "as configured; it has the exponent range of float32")
    reason = f"in place of {resolved.name}, whose range would hide values outside of it"
    return Resolution(policy("fp32"), reason)


def report(calibration: Calibration, rules: LossScaleConfig) -> Iterator[str]:
    """Yield the lines of the tables and of the advice.

    Args:
        calibration: The measurements.
        rules: The configured limits of the loss scale.
    """
    total = calibration.total
    scale = total.recommended_scale()
    ranks = "1 rank" if calibration.world_size == 1 else f"{calibration.world_size} ranks"
    yield f"{calibration.steps} steps on {ranks}, precision {calibration.policy}"
    yield (
        "float16 represents 2^-24 to 65504, with full precision from 2^-14; the tables count the "
        "gradients of each microbatch on each rank, before loss scaling"
    )
    if total.infinite or total.nan:
        yield (
            f"{total.infinite + total.nan} gradients are infinite or NaN already in this "
            "precision: training diverges with any loss scale"
        )
    if scale is None:
        yield "no gradient is finite and nonzero; nothing to recommend"
        return
    yield ""
    yield from _scale_table(calibration, scale)
    yield ""
    yield from _group_table(calibration, scale)
    yield ""
    yield from _advice(total, scale, rules)


def _scale_table(calibration: Calibration, scale: float) -> Iterator[str]:
    yield "share of the nonzero gradients that become zero, subnormal or infinite"
    yield f"{'':14}" + "".join(f"{kind:^36}" for kind in KINDS).rstrip()
    yield f"{'loss scale':14}" + f"{'zero':>12}{'subnormal':>12}{'infinite':>12}" * len(KINDS)
    recommended = _exponent(scale)
    for exponent in sorted({*SCALE_EXPONENTS, recommended}):
        shares = [share for kind in KINDS for share in calibration.of_kind(kind).shares(exponent)]
        mark = "  recommended" if exponent == recommended else ""
        name = _power(exponent)
        yield f"{name:14}" + "".join(f"{_percent(share):>12}" for share in shares) + mark


def _group_table(calibration: Calibration, scale: float) -> Iterator[str]:
    recommended = _exponent(scale)
    rows = {**calibration.groups, "total": calibration.total}
    width = max(len("layer group"), *map(len, rows))
    columns = ("smallest", "largest", "zero at 1", f"zero at {_power(recommended)}", "best scale")
    yield f"{'layer group':{width}}" + "".join(f"{column:>15}" for column in columns)
    for name, histogram in rows.items():
        best = histogram.recommended_scale()
        if best is None:
            continue
        cells = (
            _power(min(histogram.exponents)),
            _power(max(histogram.exponents)),
            _percent(histogram.shares(0).zero),
            _percent(histogram.shares(recommended).zero),
            _power(_exponent(best)),
        )
        yield f"{name:{width}}" + "".join(f"{cell:>15}" for cell in cells)


def _advice(total: ExponentHistogram, scale: float, rules: LossScaleConfig) -> Iterator[str]:
    yield (
        f"recommended: precision.loss_scale.init = {scale:g} ({_power(_exponent(scale))}); the "
        "largest gradient stays a factor of 8 or more below overflow"
    )
    if not rules.min_scale <= scale <= rules.max_scale:
        name = "min_scale" if scale < rules.min_scale else "max_scale"
        yield (
            f"precision.loss_scale.{name} = {getattr(rules, name):g} does not allow it; set it to "
            f"{scale:g} as well"
        )
    lost = total.shares(_exponent(scale)).zero
    if lost > MAX_LOST_SHARE:
        yield (
            f"with it {_percent(lost)} of the gradients still become zero: their range is too wide "
            "for float16; use a bf16 policy"
        )


def as_json(calibration: Calibration) -> dict[str, Any]:
    """Return all measurements as JSON values."""
    groups = {
        kind: {name: _as_mapping(counts) for name, counts in of_kind.items()}
        for kind, of_kind in calibration.histograms.items()
    }
    return {
        "steps": calibration.steps,
        "world_size": calibration.world_size,
        "policy": calibration.policy,
        "total": _as_mapping(calibration.total),
        **{kind: _as_mapping(calibration.of_kind(kind)) for kind in KINDS},
        "groups": groups,
    }


def _as_mapping(histogram: ExponentHistogram) -> dict[str, Any]:
    return {
        "values": histogram.values,
        "zeros": histogram.zeros,
        "infinite": histogram.infinite,
        "nan": histogram.nan,
        "exponents": {str(exponent): count for exponent, count in histogram.exponents.items()},
        "float16": {
            f"{2**exponent}": histogram.shares(exponent)._asdict() for exponent in SCALE_EXPONENTS
        },
        "recommended_scale": histogram.recommended_scale(),
    }


def _sum(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
    return reduce(add, histograms, ExponentHistogram.empty())


def _exponent(scale: float) -> int:
    return math.frexp(scale)[1] - 1


def _power(exponent: int) -> str:
    return "1" if exponent == 0 else f"2^{exponent}"


def _percent(share: float) -> str:
    if share == 0:
        return "0"
    return "<0.001%" if share < 1e-5 else f"{share:.3%}"
