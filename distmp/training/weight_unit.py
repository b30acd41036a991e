"""What the weight of a step counts: the unit of losses and throughputs that a run reports."""

from __future__ import annotations

from distmp.config import RunConfig


def weight_unit(config: RunConfig, weight: float) -> str:
    """Return what the weight of a step counts, in the singular.

    Args:
        config: The configuration.
        weight: Weight of the step.
    """
    if config.model.loss == "next_token":
        return "token"
    # A sample has more than one token or pixel; samples may be masked.
    return "sample" if weight <= config.batch.global_batch_size else "unit"


def loss_unit(config: RunConfig) -> str:
    """Return the unit of the mean loss as a suffix of the number; empty if it is unknown."""
    if config.model.loss != "next_token":
        return ""
    return f" nats per {'byte' if config.data.source == 'text' else 'token'}"
