"""Optimizers and schedules by name, and the options of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.optim import lr_scheduler

from distmp.errors import ConfigError, nearest
from distmp.optim.muon import Muon
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
# Schedulers of torch that cannot be configured with numbers.
_NOT_NUMBERS = (
    "is not configured by numbers; pass it to distmp.Engine as `schedule` in your own loop. "
    "schedule.warmup_steps adds a warm-up to any schedule"
)
NOT_BY_NAME = {
    "ReduceLROnPlateau": (
        "follows a metric; only schedules that depend on the number of updates work, such as "
        "CosineAnnealingLR"
    ),
    "LambdaLR": _NOT_NUMBERS,
    "MultiplicativeLR": _NOT_NUMBERS,
    "SequentialLR": _NOT_NUMBERS,
    "ChainedScheduler": _NOT_NUMBERS,
}


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class or function that builds an optimizer.

    Raises:
        ConfigError: If the name is unknown or its import path has no callable.
    """
    if ":" in name:
        return load_callable("optim.name", name)
    if name not in OPTIMIZERS:
        raise ConfigError("optim.name", name, nearest(name, OPTIMIZERS))
    return OPTIMIZERS[name]


def torch_schedules() -> dict[str, Callable[..., lr_scheduler.LRScheduler]]:
    """Return torch's schedulers that can be configured with numbers, by name."""
    return {
        name: value
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and value is not lr_scheduler.LRScheduler
        and name not in NOT_BY_NAME
        and not name.startswith("_")
    }
