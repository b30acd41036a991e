"""Passes stochastic rounding from a policy to the optimizer."""

from __future__ import annotations

import torch

from distmp.errors import ConfigError
from distmp.optim.adamw import AdamW
from distmp.precision.policy import PrecisionPolicy


def set_rounding(optimizer: torch.optim.Optimizer, policy: PrecisionPolicy) -> None:
    """Let an optimizer round weights as a policy says.

    Raises:
        ConfigError: If it cannot, or was built to round stochastically under another policy.
    """
    if not isinstance(optimizer, AdamW):
        if policy.stochastic_rounding:
            raise ConfigError(
                "precision.policy.stochastic_rounding",
                True,
                f"needs an optimizer that rounds, which {type(optimizer).__name__} does not; use "
                "distmp.optim.AdamW, or remove it",
            )
        return
    if optimizer.stochastic_rounding and not policy.stochastic_rounding:
        raise ConfigError(
            "optimizer",
            "stochastic_rounding=True",
            f"contradicts the policy {policy.name!r}; use 'bf16-pure,stochastic_rounding=true', or "
            "remove the argument",
        )
    optimizer.stochastic_rounding = policy.stochastic_rounding
