"""Distributed mixed-precision training in which all ranks apply or skip each step together."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from distmp import _moved

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataLoader",
    "DistmpError",
    "DistributedGradScaler",
    "DivergenceConfig",
    "Engine",
    "EngineConfig",
    "Fp32GradBuckets",
    "LossScaleConfig",
    "OverflowReport",
    "PrecisionPolicy",
    "StepNumbers",
    "StepOutcome",
    "TrainingError",
    "init",
    "policy",
    "resolve",
]

if TYPE_CHECKING:
    from distmp.buckets import Fp32GradBuckets
    from distmp.data.dataloader import DataLoader
    from distmp.diagnosis.attribution import OverflowReport
    from distmp.distributed.world import init
    from distmp.engine import Engine
    from distmp.engine.config import EngineConfig
    from distmp.engine.outcome import StepNumbers, StepOutcome
    from distmp.engine.spike_check import DivergenceConfig
    from distmp.errors import CheckpointError, ConfigError, DistmpError, TrainingError
    from distmp.precision import PrecisionPolicy, policy, resolve
    from distmp.scaling import DistributedGradScaler, LossScaleConfig
else:
    _PUBLIC_NAMES = {
        "distmp.buckets": ("Fp32GradBuckets",),
        "distmp.data.dataloader": ("DataLoader",),
        "distmp.distributed.world": ("init",),
        "distmp.engine": ("Engine",),
        "distmp.engine.config": ("EngineConfig",),
        "distmp.errors": ("CheckpointError", "ConfigError", "DistmpError", "TrainingError"),
        "distmp.engine.outcome": ("StepNumbers", "StepOutcome"),
        "distmp.precision": ("PrecisionPolicy", "policy", "resolve"),
        "distmp.scaling": ("DistributedGradScaler", "LossScaleConfig"),
        "distmp.diagnosis.attribution": ("OverflowReport",),
        "distmp.engine.spike_check": ("DivergenceConfig",),
    }

    _moved.install()

    def __getattr__(name: str) -> object:
        """Import a public name or a module at its first use: importing torch takes seconds."""
        for module, names in _PUBLIC_NAMES.items():
            if name in names:
                globals()[name] = getattr(importlib.import_module(module), name)
                return globals()[name]
        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
