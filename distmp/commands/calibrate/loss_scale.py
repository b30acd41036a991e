"""Counts the gradients of a few steps by their magnitude, and recommends a loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from distmp.config import RunConfig
from distmp.diagnosis.histogram import CLASSES, EXPONENTS, ExponentHistogram, count_exponents
from distmp.distributed.world import World
from distmp.precision import PolicyLike, Resolution, policy, resolve
from distmp.scaling import LossScaleConfig
from distmp.training.components import (
    Progress,
    build_engine,
    find_checkpoint,
    prepare,
    restore,
    start_from_weights,
    training_batches,
)
from distmp.training.strategy_choice import choose_strategy
from distmp.utils.dtypes import is_dtensor
from distmp.utils.units import counted, text_table


class GradientRecorder:
    """Counts the gradients of a module in a `with` block.

    Args:
        module: The model, prepared by any strategy.
        device: Device of the counts.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._counts = torch.zeros((EXPONENTS, CLASSES), dtype=torch.int64, device=device)
        self._handles: list[RemovableHandle] = []
        # By id; the reference makes sure that the id is not reused by another tensor.
        self._watched: dict[int, Tensor] = {}
        self._latest_output: Tensor | None = None

    def __enter__(self) -> GradientRecorder:
        for part in self._module.modules():
            self._watch_parameters(part, None)
            self._handles += [
                # FSDP replaces parameters by gathered ones before forward.
                part.register_forward_pre_hook(self._watch_parameters),
                part.register_forward_hook(self._watch_outputs),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self._latest_output = None

    def histogram(self, group: dist.ProcessGroup | None) -> ExponentHistogram:
        """Return the sum of the counts of all ranks.

        Args:
            group: The ranks, all of which have to call this; None for a single process.
        """
        total = self._counts.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return ExponentHistogram(total)

    def _watch_parameters(self, part: nn.Module, inputs: Any) -> None:
        for parameter in part.parameters(recurse=False):
            # A shard has no gradient in backward, only the parameter that is gathered from it.
            is_used = parameter.requires_grad and not is_dtensor(parameter)
            if is_used and id(parameter) not in self._watched:
                self._watched[id(parameter)] = parameter
                self._handles.append(parameter.register_hook(self._count))

    def _watch_outputs(self, part: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            # A container returns the output of its last module.
            if tensor is self._latest_output or not isinstance(tensor, Tensor):
                continue
            if tensor.requires_grad:
                self._latest_output = tensor
                tensor.register_hook(self._count)

    def _count(self, gradient: Tensor) -> None:
        self._counts.add_(count_exponents(gradient))


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
        SetupError: On every rank, if a rank cannot use the configuration.
    """
    parts = world.ranks.all_or_none(lambda: prepare(config, world))
    config, _ = choose_strategy(config, parts, world)
    measured_in, reason = _policy(config.precision.policy, world.device)
    checkpoint = world.ranks.all_or_none(lambda: find_checkpoint(config))
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
        gradients = recorder.histogram(world.group)
    return Calibration(steps, world.world_size, f"{measured_in.name} ({reason})", gradients)


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
        f"recommended: precision.loss_scale.init = {scale:g} ({_power(_exponent(scale))}); the "
        "largest gradient stays a factor of 8 or more below overflow"
    )
    if not rules.min_scale <= scale <= rules.max_scale:
        name = "min_scale" if scale < rules.min_scale else "max_scale"
        yield (
            f"precision.loss_scale.{name} = {getattr(rules, name):g} does not allow it; set it to "
            f"{scale:g} as well"
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
