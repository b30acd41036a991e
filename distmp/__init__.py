"""Distributed mixed-precision training in which every rank takes the same decision."""

from __future__ import annotations

from distmp.buckets import Fp32GradBuckets
from distmp.engine import Engine
from distmp.errors import CheckpointError, ConfigError, DistmpError, TrainingError
from distmp.outcome import StepNumbers, StepOutcome
from distmp.precision import PrecisionPolicy, policy, resolve
from distmp.scaling import DistributedGradScaler, LossScaleConfig
from distmp.scaling.attribution import OverflowReport
from distmp.scaling.divergence import DivergenceConfig

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
