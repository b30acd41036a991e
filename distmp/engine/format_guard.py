"""Decides on the device which narrow products are computed in bf16 for some steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distmp.engine.format_settings import PRODUCTS, GuardConfig
from distmp.quantization.linear import OPERANDS

# The products that an operand belongs to: a rounded weight is used in both forward and grad.
_PRODUCTS_OF = {
    "input": ("forward",),
    "weight": ("forward", "grad"),
    "grad": ("grad",),
    "wgrad_input": ("wgrad",),
    "wgrad_grad": ("wgrad",),
}
# Number of steps from a decision to the first step with its formats: see
# Note [When formats change] in `distmp.engine.format_schedule`.
DELAY = 2
CAUSES = ("saturated or non-finite values", "values that were rounded to zero", "a spike")


class FormatGuard:
    """Widens products if too many values of an operand saturate or underflow; all after a spike.

    Args:
        config: Limits and reaction.
        layers: Number of layers with narrow products.
        device: Device of the statistics.

    Attributes:
        wide_until: Number of the first step, counted from 0, in which each product is narrow again;
            int64 of shape [layers, 2, 3]. [:, 1] is the decision after the last step, and [:, 0]
            the one before it. Updated in place.
        causes: Why each product was widened last, with the shape of `wide_until`: bit i is set for
            `CAUSES[i]`. Updated in place.
    """

    def __init__(self, config: GuardConfig, layers: int, device: torch.device) -> None:
        self._config = config
        limits = [math.inf if x is None else x for x in (config.saturated, config.underflowed)]
        self._limits = torch.tensor(limits, dtype=torch.float64, device=device)
        uses = [[product in _PRODUCTS_OF[operand] for product in PRODUCTS] for operand in OPERANDS]
        self._uses = torch.tensor(uses, device=device)
        self._bits = torch.tensor([1, 2], device=device)
        self.wide_until = torch.zeros(layers, 2, len(PRODUCTS), dtype=torch.int64, device=device)
        self.causes = torch.zeros_like(self.wide_until)

    def end_step(self, sums: Tensor, spike: Tensor, taken: int) -> None:
        """Decide after a step; the host does not wait.

        Args:
            sums: Saturated, underflowed and all values of each layer and operand, over all ranks,
                FP64 [layers, 5, 3].
            spike: Whether the step was a spike, 0-dim bool.
            taken: Number of steps taken, this one included.
        """
        above = sums[..., :2] > sums[..., 2:] * self._limits
        # [layers, products, limits]; with size 1 where all have the same.
        requested = (above[:, :, None] & self._uses[..., None]).any(1)
        if self._config.widen != "product":
            requested = requested.any(1, keepdim=True)
        if self._config.widen == "policy":
            requested = requested.any(0, keepdim=True)
        causes = (requested * self._bits).sum(2)
        if self._config.on_spike:
            causes = causes + 4 * spike
        until = (causes > 0) * (taken - 1 + DELAY + self._config.steps)
        self.wide_until[:, 0] = self.wide_until[:, 1]
        self.wide_until[:, 1] = self.wide_until[:, 1].maximum(until)
        self.causes[:, 0] = self.causes[:, 1]
        self.causes[:, 1] = self.causes[:, 1].where(causes == 0, causes)


def cause_text(causes: int) -> str:
    """Return the causes whose bits are set, as text; empty for none."""
    return " and ".join(cause for index, cause in enumerate(CAUSES) if causes >> index & 1)
