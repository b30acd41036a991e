"""Optimizers and schedules by name, and the options that each takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch.optim import lr_scheduler

from distmp.errors import ConfigError, nearest
from distmp.utils.imports import load_object

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
# Settings of their own, which as an option of the optimizer would be overridden or override.
OWN_SETTINGS = ("lr", "weight_decay")
SHAPES = ("cosine", "linear", "constant")
# Schedulers of torch that a name and options are not enough for.
_NEEDS_FUNCTION = (
    "needs a Python function; give it to distmp.Engine as `schedule` in a loop of your own, or "
    "use CosineAnnealingLR, PolynomialLR or another that numbers are enough for"
)
_NEEDS_SCHEDULERS = (
    "is made of other schedulers; give it to distmp.Engine as `schedule` in a loop of your own. "
    "schedule.warmup_steps puts a warm-up before any schedule"
)
NOT_BY_NAME = {
    "ReduceLROnPlateau": (
        "follows a metric; only schedules that depend on the number of updates alone work, such "
        "as CosineAnnealingLR"
    ),
    "LambdaLR": _NEEDS_FUNCTION,
    "MultiplicativeLR": _NEEDS_FUNCTION,
    "SequentialLR": _NEEDS_SCHEDULERS,
    "ChainedScheduler": _NEEDS_SCHEDULERS,
}


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class or function that builds an optimizer.

    Raises:
        ConfigError: If there is none of this name.
    """
    if ":" in name:
        build = load_object("optim.name", name)
    elif name in OPTIMIZERS:
        build = OPTIMIZERS[name]
    else:
        raise ConfigError("optim.name", name, nearest(name, OPTIMIZERS))
    if not callable(build):
        raise ConfigError("optim.name", name, "name something callable")
    return cast("Callable[..., torch.optim.Optimizer]", build)


def optimizer_options(name: str) -> list[str]:
    """Return what `optim.options` may hold for an optimizer.

    Raises:
        ConfigError: For an unknown optimizer.
    """
    accepted = inspect.signature(find_optimizer(name)).parameters
    return [option for option in accepted if option not in ("params", *OWN_SETTINGS)]


def schedule_options(name: str) -> list[str]:
    """Return what `schedule.options` may hold for a scheduler of torch; nothing for others."""
    build = torch_schedules().get(name)
    parameters = () if build is None else inspect.signature(build).parameters
    return [option for option in parameters if option != "optimizer"]


def torch_schedules() -> dict[str, Callable[..., lr_scheduler.LRScheduler]]:
    """Return torch's schedulers that a name and options are enough for."""
    return {
        name: value
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and value is not lr_scheduler.LRScheduler
        and name not in NOT_BY_NAME
        and not name.startswith("_")
    }
