"""Distributed mixed-precision training in which all ranks apply or skip each step together."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

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
    "PrecisionPhase",
    "PrecisionPolicy",
    "StepNumbers",
    "StepOutcome",
    "TrainingError",
    "audit",
    "global_mean",
    "init",
    "policy",
    "resolve",
]

if TYPE_CHECKING:
    from distmp.buckets import Fp32GradBuckets
    from distmp.data.dataloader import DataLoader
    from distmp.diagnosis.attribution import OverflowReport
    from distmp.distributed.world import init
    from distmp.engine.engine import Engine
    from distmp.engine.engine_config import EngineConfig
    from distmp.engine.outcome import StepNumbers, StepOutcome
    from distmp.engine.settings import DivergenceConfig, PrecisionPhase
    from distmp.errors import CheckpointError, ConfigError, DistmpError, TrainingError
    from distmp.parallel.global_mean import global_mean
    from distmp.precision import PrecisionPolicy, policy, resolve
    from distmp.scaling.grad_scaler import DistributedGradScaler
    from distmp.scaling.settings import LossScaleConfig
    from distmp.testing.auditing import audit
else:
    _PUBLIC_NAMES = {
        "distmp.buckets": ("Fp32GradBuckets",),
        "distmp.data.dataloader": ("DataLoader",),
        "distmp.distributed.world": ("init",),
        "distmp.engine.engine": ("Engine",),
        "distmp.engine.engine_config": ("EngineConfig",),
        "distmp.errors": ("CheckpointError", "ConfigError", "DistmpError", "TrainingError"),
        "distmp.engine.outcome": ("StepNumbers", "StepOutcome"),
        "distmp.parallel.global_mean": ("global_mean",),
        "distmp.precision": ("PrecisionPolicy", "policy", "resolve"),
        "distmp.scaling.grad_scaler": ("DistributedGradScaler",),
        "distmp.scaling.settings": ("LossScaleConfig",),
        "distmp.testing.auditing": ("audit",),
        "distmp.diagnosis.attribution": ("OverflowReport",),
        "distmp.engine.settings": ("DivergenceConfig", "PrecisionPhase"),
    }

    _public_name = lazy_names(__name__, _PUBLIC_NAMES)

    def __getattr__(name: str) -> object:
        """Import a public name or a module at its first use."""
        if name not in __all__ and not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        return _public_name(name)
