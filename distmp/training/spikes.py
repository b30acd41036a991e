"""Selects the action for a step whose loss or gradient norm is out of bounds."""

from __future__ import annotations

import math
from typing import NamedTuple

from distmp.engine.outcome import StepNumbers
from distmp.engine.settings import DivergenceConfig


class SpikeAction(NamedTuple):
    """The action for a step that is out of bounds.

    Attributes:
        problem: What is out of bounds, as text.
        action: "warn", "skip" or "rollback".
    """

    problem: str
    action: str


def action_for(numbers: StepNumbers, config: DivergenceConfig) -> SpikeAction | None:
    """Return the action for a step, or None if there is none; the same on every rank."""
    if numbers.weight > 0 and not math.isfinite(numbers.loss):
        problem, action = f"the loss is {numbers.loss}", config.on_nonfinite_loss
    elif numbers.spike:
        problem, action = _describe_spike(numbers), config.on_spike
    else:
        return None
    return None if action == "ignore" else SpikeAction(problem, action)


def _describe_spike(numbers: StepNumbers) -> str:
    parts = []
    if numbers.loss > numbers.loss_limit:
        parts.append(f"loss {numbers.loss:.4g} is above its limit of {numbers.loss_limit:.4g}")
    if numbers.grad_norm > numbers.norm_limit:
        parts.append(f"norm {numbers.grad_norm:.4g} is above its limit of {numbers.norm_limit:.4g}")
    return " and ".join(parts)
