"""Precision policies: what is stored, computed, reduced and scaled in which floating-point type."""

from distmp.precision.hardware import Resolution, resolve
from distmp.precision.notation import PolicyLike, as_mapping, as_text, policy
from distmp.precision.policy import PRESETS, PrecisionPolicy

__all__ = [
    "PRESETS",
    "PolicyLike",
    "PrecisionPolicy",
    "Resolution",
    "as_mapping",
    "as_text",
    "policy",
    "resolve",
]
