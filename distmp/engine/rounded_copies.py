"""Warns if `state_dict` returns 16-bit copies of the weights instead of the FP32 weights."""

from __future__ import annotations

import warnings

from torch import nn

from distmp.precision.policy import PrecisionPolicy
from distmp.utils.dtypes import dtype_name


def warn_about_copies(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Warn once when `module.state_dict()` is called, if its parameters are copies of FP32 weights.

    Args:
        module: The module that holds the copies.
        policy: The precision policy.
    """
    if policy.has_masters:
        module.register_state_dict_pre_hook(_WarnOnce(dtype_name(policy.compute_dtype)))


class _WarnOnce:  # not a closure, which could not be pickled with the module
    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._done = False

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._done or keep_vars:  # with keep_vars the caller asks for the parameters themselves
            return
        self._done = True
        warnings.warn(
            f"module.state_dict() returns {self._dtype} copies of the weights; the FP32 weights "
            "are in engine.state_dict(), and engine.export(folder) writes them",
            RuntimeWarning,
            stacklevel=3,
        )
