"""Distributed mixed-precision training in which every rank takes the same decision."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DistmpError",
    "DistributedGradScaler",
    "DivergenceConfig",
    "Engine",
    "Fp32GradBuckets",
    "LossScaleConfig",
    "OverflowReport",
    "PrecisionPolicy",
    "StepNumbers",
    "StepOutcome",
    "TrainingError",
    "policy",
    "resolve",
]

if TYPE_CHECKING:
    from distmp.buckets import Fp32GradBuckets
    from distmp.engine import Engine
    from distmp.errors import CheckpointError, ConfigError, DistmpError, TrainingError
    from distmp.outcome import StepNumbers, StepOutcome
    from distmp.precision import PrecisionPolicy, policy, resolve
    from distmp.scaling import DistributedGradScaler, LossScaleConfig
    from distmp.scaling.attribution import OverflowReport
    from distmp.scaling.divergence import DivergenceConfig
else:
    _HOMES = {
        "distmp.buckets": ("Fp32GradBuckets",),
        "distmp.engine": ("Engine",),
        "distmp.errors": ("CheckpointError", "ConfigError", "DistmpError", "TrainingError"),
        "distmp.outcome": ("StepNumbers", "StepOutcome"),
        "distmp.precision": ("PrecisionPolicy", "policy", "resolve"),
        "distmp.scaling": ("DistributedGradScaler", "LossScaleConfig"),
        "distmp.scaling.attribution": ("OverflowReport",),
        "distmp.scaling.divergence": ("DivergenceConfig",),
    }

    def __getattr__(name: str) -> object:
        """Import a public name, or a module, when it is first used: torch takes seconds."""
        for home, names in _HOMES.items():
            if name in names:
                globals()[name] = getattr(importlib.import_module(home), name)
                return globals()[name]
        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
