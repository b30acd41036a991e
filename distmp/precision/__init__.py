"""Precision policies: what is stored, computed and scaled in which floating-point type."""

from distmp.precision.hardware import Resolution, resolve
from distmp.precision.policy import PRESETS, PrecisionPolicy, policy

__all__ = ["PRESETS", "PrecisionPolicy", "Resolution", "policy", "resolve"]
