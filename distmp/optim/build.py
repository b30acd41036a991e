"""Builds optimizers and learning-rate schedules from their settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from distmp.errors import ConfigError, nearest
from distmp.optim.adamw import AdamW
from distmp.optim.checks import check_kind, cycles_momentum, refuse_kind
from distmp.optim.names import (
    NOT_BY_NAME,
    OWN_SETTINGS,
    find_optimizer,
    optimizer_options,
    torch_schedules,
)
from distmp.optim.settings import SHAPES, OptimizerConfig, ScheduleConfig

NamedParameters = Sequence[tuple[str, Tensor]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]
ScheduleFactory = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
# Options of `distmp.optim.AdamW` in `optim.options`.
ADAMW_OPTIONS = ("betas", "eps")
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
    if config.state is not None or stochastic_rounding:
        return _adamw_factory(config, stochastic_rounding=stochastic_rounding, seed=seed)
    build = find_optimizer(config.name)
    if inspect.isclass(build) and issubclass(build, torch.optim.Optimizer):
        refuse_kind(build, "optim.name", config.name)
    accepted = inspect.signature(build).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    for name, value in config.options.items():
        if name in OWN_SETTINGS:
            raise ConfigError(f"optim.options.{name}", value, f"set optim.{name} instead")
        if name not in accepted and not accepts_any:
            choices = optimizer_options(config.name)
            problem = f"{nearest(name, choices)}; optim.options: {{}} removes all options"
            raise ConfigError(f"optim.options.{name}", value, problem)
        _check_like_default(f"optim.options.{name}", value, accepted.get(name))
    options = {"lr": config.lr, **config.options}
    if "fused" in accepted and not any(options.get(name) for name in NOT_WITH_FUSED):
        # The fused kernel unscales, clips and skips on the device, without a host synchronization.
        # Older releases of torch have no fused Adagrad for CUDA.
        options.setdefault("fused", build is not torch.optim.Adagrad)
    return _with_groups(config, build, options)


def _adamw_factory(
    config: OptimizerConfig, *, stochastic_rounding: bool, seed: int
) -> OptimizerFactory:
    """Return the function that builds `distmp.optim.AdamW`.

    Raises:
        ConfigError: For another optimizer, or an option that only torch's AdamW has.
    """
    if config.name != "adamw":
        raise ConfigError(
            "precision.policy.stochastic_rounding",
            True,
            f"needs an optimizer that rounds, which {config.name!r} does not; set optim.name to "
            "adamw, or remove it",
        )
    for name, value in config.options.items():
        if name in OWN_SETTINGS:
            raise ConfigError(f"optim.options.{name}", value, f"set optim.{name} instead")
        if name not in ADAMW_OPTIONS:
            cause = "optim.state" if config.state else "stochastic rounding"
            raise ConfigError(
                f"optim.options.{name}",
                value,
                f"AdamW with {cause} takes {' and '.join(ADAMW_OPTIONS)} only; remove it",
            )
        _check_like_default(
            f"optim.options.{name}", value, inspect.signature(AdamW).parameters[name]
        )
    options = {
        "lr": config.lr,
        "state": config.state,
        "stochastic_rounding": stochastic_rounding,
        "seed": seed,
        **config.options,
    }
    return _with_groups(config, AdamW, options)


def _check_like_default(setting: str, value: object, parameter: inspect.Parameter | None) -> None:
    """Refuse a value that is no number where the default is one, or not as many numbers.

    Optimizers and schedulers of torch accept some of these, and fail in a later step.

    Raises:
        ConfigError: If the value is of another kind than the default.
    """
    default = getattr(parameter, "default", None)
    wanted = default if isinstance(default, tuple) else (default,)
    given = value if isinstance(default, tuple) else (value,)
    if not all(map(_is_number, wanted)):
        return
    if not isinstance(given, tuple | list) or len(given) != len(wanted):
        raise ConfigError(setting, value, f"write {len(wanted)} numbers, as in {list(wanted)}")
    if not all(map(_is_number, given)):
        raise ConfigError(setting, value, f"write {'numbers' if wanted is default else 'a number'}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_groups(
    config: OptimizerConfig,
    build: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
) -> OptimizerFactory:
    """Return the function that builds an optimizer on groups with and without weight decay."""

    def create(named_parameters: NamedParameters) -> torch.optim.Optimizer:
        groups = weight_decay_groups(named_parameters, config.weight_decay)
        try:
            optimizer: torch.optim.Optimizer = build(groups, **options)
        except ConfigError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                "optim.options", config.options, f"refused by {config.name}: {error}"
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                "optim.name",
                config.name,
                f"returned a {type(optimizer).__name__}; name a class or a function that returns a "
                "torch.optim.Optimizer",
            )
        check_kind(optimizer, "optim.name", config.name)
        return optimizer

    return create


def weight_decay_groups(
    named_parameters: NamedParameters, weight_decay: float
) -> list[dict[str, Any]]:
    """Return parameter groups: matrices with weight decay, vectors (biases, norms) without."""
    matrices = [entry for entry in named_parameters if entry[1].dim() >= 2]
    vectors = [entry for entry in named_parameters if entry[1].dim() < 2]
    groups = (
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


def schedule_factory(config: ScheduleConfig, steps: int) -> ScheduleFactory:
    """Return the function that builds the configured schedule on an optimizer.

    Args:
        config: The settings of the schedule.
        steps: Number of updates of the run. Cosine and linear reach `config.final` at its end.

    Raises:
        ConfigError: If the schedule is unknown, its options do not fit, or it needs a metric.
    """
    if config.name in SHAPES:
        if config.options:
            raise ConfigError(
                "schedule.options",
                config.options,
                f"{config.name!r} takes none; name a scheduler of torch.optim.lr_scheduler",
            )
        most = max(0, steps - config.warmup(steps))
        if (config.decay_steps or 0) > most:
            raise ConfigError(
                "schedule.decay_steps",
                config.decay_steps,
                f"is more than the run has after its warm-up; use at most {most}",
            )
        return lambda optimizer: _with_warmup(optimizer, config, steps, _shape)
    if config.name in NOT_BY_NAME:
        raise ConfigError("schedule.name", config.name, NOT_BY_NAME[config.name])
    known = torch_schedules()
    if config.name not in known:
        raise ConfigError("schedule.name", config.name, nearest(config.name, [*SHAPES, *known]))
    accepted = inspect.signature(known[config.name]).parameters
    for name, value in config.options.items():
        _check_like_default(f"schedule.options.{name}", value, accepted.get(name))
    _try_steps(known[config.name], config)

    def from_torch(
        optimizer: torch.optim.Optimizer, config: ScheduleConfig, steps: int
    ) -> lr_scheduler.LRScheduler:
        try:
            scheduler = known[config.name](optimizer, **config.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "schedule.options", config.options, f"refused by {config.name}: {error}"
            ) from error
        _check_from_torch(scheduler, config, steps)
        return scheduler

    return lambda optimizer: _with_warmup(optimizer, config, steps, from_torch)


def _try_steps(build: ScheduleFactory, config: ScheduleConfig) -> None:
    """Refuse options with which a scheduler is built, but fails when it is stepped.

    Raises:
        ConfigError: If it fails.
    """
    optimizer = torch.optim.AdamW([torch.zeros(())])
    try:
        scheduler = build(optimizer, **config.options)
    except (TypeError, ValueError, KeyError):
        return  # reported with the optimizer of the run
    optimizer.step()
    try:
        for _ in range(3):
            scheduler.step()
    except (TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigError(
            "schedule.options", config.options, f"refused by {config.name}: {error}"
        ) from error


def _check_from_torch(
    scheduler: lr_scheduler.LRScheduler, config: ScheduleConfig, steps: int
) -> None:
    if cycles_momentum(scheduler):
        raise ConfigError(
            "schedule.options.cycle_momentum",
            True,
            f"only learning rates follow a schedule, but {config.name} also changes the momentum; "
            "set it to false",
        )
    # OneCycleLR ends: it has one rate for the start, and one after each of `total_steps` updates.
    last = getattr(scheduler, "total_steps", None)
    if last is not None and steps > last + 1:
        raise ConfigError(
            "schedule.options.total_steps",
            last,
            f"{config.name} ends before the run, which has {steps} updates; set it to {steps}",
        )


def _with_warmup(
    optimizer: torch.optim.Optimizer,
    config: ScheduleConfig,
    steps: int,
    main: Callable[[torch.optim.Optimizer, ScheduleConfig, int], lr_scheduler.LRScheduler],
) -> lr_scheduler.LRScheduler:
    warmup_steps = config.warmup(steps)
    if warmup_steps == 0:
        return main(optimizer, config, steps)
    warmup = lr_scheduler.LinearLR(
        optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps
    )
    rest = main(optimizer, config, max(1, steps - warmup_steps))
    return lr_scheduler.SequentialLR(optimizer, [warmup, rest], [warmup_steps])


def _shape(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, steps: int
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
    done = min(1.0, max(0, update - (steps - decay)) / decay) if decay else 0.0
    return 1.0 + done * (config.final - 1.0)
