"""Warns if `state_dict` returns 16-bit copies of the weights instead of the FP32 weights."""

from __future__ import annotations

import functools
import warnings

from torch import nn

from distmp.precision.policy import PrecisionPolicy
from distmp.utils.dtypes import dtype_name


def warn_about_copies(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Warn when `module.state_dict()` is called, if its parameters are copies of FP32 weights.

    Args:
        module: The module that holds the copies.
        policy: The precision policy.
    """
    if policy.has_masters:
        # Not a closure, which could not be pickled with the module.
        warn = functools.partial(_warn, dtype_name(policy.compute_dtype))
        module.register_state_dict_pre_hook(warn)


def _warn(dtype: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # with keep_vars the caller asks for the parameters themselves
        warnings.warn(
            f"module.state_dict() returns {dtype} copies of the weights; the FP32 weights "
            "are in engine.state_dict(), and engine.export(folder) writes them",
            RuntimeWarning,
            stacklevel=3,
        )
