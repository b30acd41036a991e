"""Precision policies: the dtypes of parameters, compute, reduction and buffers; loss scaling."""

from distmp.precision.notation import PolicyLike, Resolution, policy, resolve
from distmp.precision.policy import PRESETS, PrecisionPolicy

__all__ = ["PRESETS", "PolicyLike", "PrecisionPolicy", "Resolution", "policy", "resolve"]
