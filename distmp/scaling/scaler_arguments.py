"""Checks the arguments of `DistributedGradScaler`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distmp.errors import CheckpointError, ConfigError


def check_device(device: object) -> None:
    """Refuse a value that is not a device type.

    Raises:
        ConfigError: Naming the value.
    """
    try:
        if isinstance(device, str):
            torch.device(device)
            return
    except RuntimeError:
        pass
    raise ConfigError("device", device, "is not a device type; use 'cuda' or 'cpu'")


def check_numbers(**numbers: object) -> None:
    """Refuse arguments that are not numbers; those with a default of None may be None.

    Raises:
        ConfigError: Naming the first one.
    """
    optional = ("min_scale", "max_scale", "max_consecutive_skips")
    for name, value in numbers.items():
        if value is None and name in optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(name, value, "must be a number")


def check_switches(**switches: object) -> None:
    """Refuse arguments that are neither True nor False.

    Raises:
        ConfigError: Naming the first one.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(name, value, "must be True or False")


def check_optimizer(optimizer: object) -> None:
    """Refuse an object without parameter groups.

    Raises:
        ConfigError: Naming the type of the object.
    """
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        kind = type(optimizer).__name__
        raise ConfigError("optimizer", kind, "is not an optimizer; pass a torch.optim.Optimizer")


def as_scale(new_scale: object) -> float | Tensor:
    """Return a scale in a form that torch's scaler accepts.

    Raises:
        ConfigError: If it is not a number.
    """
    if isinstance(new_scale, Tensor):
        return new_scale
    if isinstance(new_scale, bool) or not isinstance(new_scale, int | float):
        raise ConfigError("new_scale", new_scale, "use a positive finite number")
    return float(new_scale)


def check_state(state: Any) -> None:
    """Refuse a value that is not the state of a scaler.

    Raises:
        CheckpointError: Naming what is missing.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a {type(state).__name__} is not the state of a scaler; pass the result of "
            "scaler.state_dict()"
        )
    missing = [name for name in ("scale", "_growth_tracker") if state and name not in state]
    if missing:
        raise CheckpointError(
            f"the state of the scaler has no {', '.join(missing)}; pass the result of "
            "scaler.state_dict()"
        )
