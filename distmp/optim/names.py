"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
