"""Returns the functions that build optimizers and learning-rate schedules from settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from distmp.errors import ConfigError, nearest, require
from distmp.optim.adamw import AdamW
from distmp.optim.learning_rates import ERRORS
from distmp.optim.muon import Muon
from distmp.optim.settings import SHAPES, OptimizerConfig, ScheduleConfig
from distmp.utils.annotations import expected, hint
from distmp.utils.imports import load_callable

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "muon": Muon,
}
# Settings of section `optim`; as options of the optimizer they would conflict with those.
OWN_SETTINGS = ("lr", "weight_decay")


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class or function that builds an optimizer.

    Raises:
        ConfigError: If the name is unknown or its import path has no callable.
    """
    if ":" in name:
        return load_callable("optim.name", name)
    require(name in OPTIMIZERS, "optim.name", name, nearest(name, OPTIMIZERS))
    return OPTIMIZERS[name]


NamedParameters = Sequence[tuple[str, Tensor]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]
ScheduleFactory = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
NOT_WITH_FUSED = ("foreach", "differentiable")


def optimizer_factory(
    config: OptimizerConfig, *, stochastic_rounding: bool = False, seed: int = 0
) -> OptimizerFactory:
    """Return the function that builds the configured optimizer over named parameters.

    Args:
        config: The settings.
        stochastic_rounding: Whether the optimizer rounds 16-bit weights stochastically.
        seed: Seed of stochastic rounding.

    Raises:
        ConfigError: If the optimizer or one of its options is unknown. The returned function raises
            it for values that the optimizer refuses.
    """
    build = find_optimizer(config.name)
    options: dict[str, Any] = {"lr": config.lr}
    if config.name == "adamw" and stochastic_rounding:
        build = AdamW
        options |= {"stochastic_rounding": True, "seed": seed}
    accepted = inspect.signature(build).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    choices = [name for name in accepted if name not in ("params", *OWN_SETTINGS, *options)]
    for name, value in config.options.items():
        setting = f"optim.options.{name}"
        require(name not in OWN_SETTINGS, setting, value, f"set optim.{name} instead")
        if name not in choices and not accepts_any:
            problem = f"{nearest(name, choices)}; optim.options: {{}} removes all options"
            raise ConfigError(setting, value, problem)
        default = accepted[name].default if name in accepted else None
        # torch counts the text 'no' as true. Its `foreach` and `fused` are None by default.
        is_switch = isinstance(default, bool) or name in ("foreach", "fused")
        if is_switch and not (isinstance(value, bool) or value is default):
            raise ConfigError(setting, value, f"must be {expected(bool)}{hint(bool, value)}")
        length = len(value) if isinstance(value, list | tuple) else None
        numbers = [n for n in (value if length else [value]) if isinstance(n, float)]
        require(all(map(math.isfinite, numbers)), setting, value, "use finite numbers")
        # torch's AdamW accepts three betas, and fails in the first step.
        if isinstance(default, tuple) and length != len(default):
            problem = f"write {len(default)} numbers, as in {[*default]}"
            raise ConfigError(setting, value, problem)
    options |= config.options
    if "fused" in accepted and not any(options.get(name) for name in NOT_WITH_FUSED):
        # The fused kernel unscales, clips and skips on the device, without a host synchronization.
        # Older releases of torch have no fused Adagrad for CUDA.
        options.setdefault("fused", build is not torch.optim.Adagrad)
    return partial(_with_groups, config, build, options)


def _with_groups(
    config: OptimizerConfig,
    build: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    named_parameters: NamedParameters,
) -> torch.optim.Optimizer:
    """Build an optimizer on groups with and without weight decay."""
    groups = weight_decay_groups(named_parameters, config.weight_decay)
    try:
        optimizer: torch.optim.Optimizer = build(groups, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"refused by {config.name}: {error}"
        raise ConfigError("optim.options", config.options, problem) from error
    problem = (
        f"returned a {type(optimizer).__name__}; name a class or a function that returns a "
        "torch.optim.Optimizer"
    )
    require(isinstance(optimizer, torch.optim.Optimizer), "optim.name", config.name, problem)
    return optimizer


def weight_decay_groups(
    named_parameters: NamedParameters, weight_decay: float
) -> list[dict[str, Any]]:
    """Return parameter groups: matrices with weight decay, vectors (biases, norms) without."""
    matrices = [entry for entry in named_parameters if entry[1].dim() >= 2]
    vectors = [entry for entry in named_parameters if entry[1].dim() < 2]
    decays = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": part, "weight_decay": decay} for part, decay in decays if part]


def schedule_factory(config: ScheduleConfig, steps: int) -> ScheduleFactory:
    """Return the function that builds the configured schedule on an optimizer.

    Args:
        config: The settings of the schedule.
        steps: Number of updates of the run, after which shapes with an end reach `config.final`.

    Raises:
        ConfigError: If the schedule is unknown, its options do not fit, or it needs a metric.
    """
    if config.name in SHAPES:
        problem = f"{config.name!r} takes none; name a scheduler by its import path"
        require(not config.options, "schedule.options", config.options, problem)
        most = max(0, steps - config.warmup(steps))
        problem = f"is more than the run has after its warm-up; use at most {most}"
        decay = config.decay_steps
        require((decay or 0) <= most, "schedule.decay_steps", decay, problem)
        return partial(_with_warmup, config, steps, partial(_shape, config))
    problem = f"{nearest(config.name, SHAPES)}, or write an import path 'module:callable'"
    require(":" in config.name, "schedule.name", config.name, problem)
    build = load_callable("schedule.name", config.name)

    def imported(optimizer: torch.optim.Optimizer, steps: int) -> lr_scheduler.LRScheduler:
        try:
            scheduler: lr_scheduler.LRScheduler = build(optimizer, **config.options)
        except ERRORS as error:
            problem = f"refused by {config.name}: {error}"
            raise ConfigError("schedule.options", config.options, problem) from error
        _check_end(scheduler, config, steps)
        return scheduler

    return partial(_with_warmup, config, steps, imported)


def _check_end(scheduler: lr_scheduler.LRScheduler, config: ScheduleConfig, steps: int) -> None:
    # OneCycleLR ends: it has one rate for the start, and one after each of `total_steps` updates.
    last = getattr(scheduler, "total_steps", None)
    problem = f"{config.name} ends before the run, which has {steps} updates; set it to {steps}"
    require(last is None or steps <= last + 1, "schedule.options.total_steps", last, problem)


def _with_warmup(
    config: ScheduleConfig,
    steps: int,
    main: Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler],
    optimizer: torch.optim.Optimizer,
) -> lr_scheduler.LRScheduler:
    warmup_steps = config.warmup(steps)
    if warmup_steps == 0:
        return main(optimizer, steps)
    warmup = lr_scheduler.LinearLR(
        optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps
    )
    rest = main(optimizer, max(1, steps - warmup_steps))
    return lr_scheduler.SequentialLR(optimizer, [warmup, rest], [warmup_steps])


def _shape(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, steps: int
) -> lr_scheduler.LRScheduler:
    if config.name == "cosine":
        # Not CosineAnnealingLR: its minimum is the same for groups with different peaks.
        return lr_scheduler.LambdaLR(optimizer, partial(_cosine, steps, config))
    if config.name == "wsd":
        decay = config.decay_steps if config.decay_steps is not None else max(1, steps // 10)
        return lr_scheduler.LambdaLR(optimizer, partial(_stable_then_decay, steps, decay, config))
    end = config.final if config.name == "linear" else 1.0
    return lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=end, total_iters=steps)


def _cosine(steps: int, config: ScheduleConfig, update: int) -> float:
    """Return the share of the peak at an update, counted after the warm-up."""
    done = min(1.0, max(0, update) / steps)
    return config.final + (1.0 - config.final) * (1.0 + math.cos(math.pi * done)) / 2


def _stable_then_decay(steps: int, decay: int, config: ScheduleConfig, update: int) -> float:
    """Return the share of the peak at an update, counted after the warm-up."""
    # All `decay` updates are between the peak and `final`, like those of the warm-up: the update
    # after the last one would be at `final`, so that a final rate of 0 wastes none.
    done = min(1.0, max(0, update + 1 - (steps - decay)) / (decay + 1)) if decay else 0.0
    return 1.0 + done * (config.final - 1.0)
