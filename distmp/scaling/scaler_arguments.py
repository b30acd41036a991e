"""Checks of what `DistributedGradScaler` is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distmp.errors import CheckpointError, ConfigError


def check_device(device: object) -> None:
    """Refuse what names no type of device.

    Raises:
        ConfigError: Naming what came in its place.
    """
    try:
        if isinstance(device, str):
            torch.device(device)
            return
    except RuntimeError:
        pass
    raise ConfigError("device", device, "is no type of device; use 'cuda' or 'cpu'")


def check_numbers(**numbers: object) -> None:
    """Refuse arguments that are no numbers; those with a default of None may be None.

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
    """Refuse what has no parameter groups.

    Raises:
        ConfigError: Naming what came in its place.
    """
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        kind = type(optimizer).__name__
        raise ConfigError("optimizer", kind, "is no optimizer; pass the one whose step is taken")


def as_scale(new_scale: object) -> float | Tensor:
    """Return a scale as torch's scaler takes it.

    Raises:
        ConfigError: For what is no number.
    """
    if isinstance(new_scale, Tensor):
        return new_scale
    if isinstance(new_scale, bool) or not isinstance(new_scale, int | float):
        raise ConfigError("new_scale", new_scale, "use a positive finite number")
    return float(new_scale)


def check_state(state: Any) -> None:
    """Refuse what no scaler has returned as its state.

    Raises:
        CheckpointError: Saying what is missing.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a {type(state).__name__} is no state of a scaler; pass what scaler.state_dict() "
            "returned"
        )
    missing = [name for name in ("scale", "_growth_tracker") if state and name not in state]
    if missing:
        raise CheckpointError(
            f"the state of the scaler lacks {', '.join(missing)}; pass what scaler.state_dict() "
            "returned"
        )
