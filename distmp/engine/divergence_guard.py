"""Detects spikes: steps whose loss or gradient norm is far above that of previous steps.

The limits are robust: they use the median of a window of steps and the median absolute deviation
from it (MAD; Hampel 1974), which tolerate outliers in up to half of the window. Losses are compared
directly, since they may be negative; norms by their logarithm, since they vary by factors.

    limit = median + threshold * max(1.4826 * MAD, smallest deviation)

1.4826 MAD is the standard deviation of normally distributed values. All values are small FP64
tensors on the device, so a step can be skipped without a host-device synchronization. They are
computed from reduced values, so they are the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from distmp.engine.settings import DivergenceConfig
from distmp.scaling.step_decision import StepDecision

# Number of steps that the limits are computed from.
WINDOW = 128
# Ratio of standard deviation to median absolute deviation of a normal distribution.
DEVIATION_OF_MAD = 1.4826
# Lower bounds of the deviations, without which every step would be a spike after a window of equal
# values: of the loss, relative to its median; of the logarithm of the norm.
SMALLEST_LOSS_DEVIATION = 0.01
SMALLEST_LOG_NORM_DEVIATION = 0.05


class SpikeCheck(NamedTuple):
    """The result of the spike check of a step: 0-dim tensors on the device, numbers without one.

    Attributes:
        spike: bool, whether loss or norm are above their limits.
        skip: bool, whether the update has to be skipped; None without a check.
        loss_limit: FP64, limit of the loss; inf during warm-up.
        norm_limit: FP64, limit of the gradient norm; inf during warm-up.
    """

    spike: Tensor | bool
    skip: Tensor | None
    loss_limit: Tensor | float
    norm_limit: Tensor | float


class DivergenceGuard:
    """Checks steps for spikes, and remembers their losses and norms for the next checks.

    Steps with an overflow, a global weight of 0 or a non-finite loss are not remembered. Spikes
    are, so that the limits follow a run that stays at a new level.

    Args:
        config: Thresholds and reactions; None disables the check.
        device: Device of the step decisions.
    """

    def __init__(self, config: DivergenceConfig | None, device: torch.device) -> None:
        self.config = config
        # Losses and logarithms of norms, the latest last, and the number of steps seen.
        self._values = torch.zeros(2, WINDOW, dtype=torch.float64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)
        if config is not None:
            # Created once: making a device tensor from Python numbers makes the host wait.
            self._threshold = torch.tensor(config.threshold, dtype=torch.float64, device=device)
            self._indices = torch.arange(WINDOW, device=device)
        self._never = torch.zeros((), dtype=torch.bool, device=device)

    def check(self, decision: StepDecision) -> SpikeCheck:
        """Check a step before its update; the host does not wait."""
        config = self.config
        if config is None:
            return SpikeCheck(False, None, math.inf, math.inf)
        spike, limits = self._never, self._find_limits(config)
        if config.on_spike != "ignore":
            values, usable = _comparable(decision)
            spike = (values > limits).any() & usable
        skip = spike if config.on_spike == "skip" else self._never
        if not config.rolls_back:
            skip = skip | ~decision.loss.isfinite()
        return SpikeCheck(spike, skip, limits[0], limits[1].exp())

    def remember(self, decision: StepDecision) -> None:
        """Add a step to the window that the limits are computed from."""
        if self.config is None:
            return
        values, usable = _comparable(decision)
        shifted = torch.cat([self._values[:, 1:], values[:, None]], 1)
        # In place: `state_dict` returns these tensors, and a checkpoint is loaded into them.
        self._values.copy_(torch.where(usable, shifted, self._values))
        self._seen += usable

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state: names and shapes do not depend on the configuration."""
        return {"values": self._values, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state with the names of `state_dict`."""
        self._values.copy_(state["values"])
        self._seen.copy_(state["seen"])

    def _find_limits(self, config: DivergenceConfig) -> Tensor:
        """Return the limits of the loss and of the logarithm of the norm, FP64 of shape (2,)."""
        count = self._seen.clamp(max=WINDOW)
        unused = self._indices < WINDOW - count
        # The lower of two middle values, like torch.median.
        middle = ((count - 1).clamp(min=0) // 2).expand(2, 1)

        def median(values: Tensor) -> Tensor:
            ordered = torch.where(unused, math.inf, values).sort(1).values
            return ordered.gather(1, middle)

        medians = median(self._values)
        deviations = DEVIATION_OF_MAD * median((self._values - medians).abs()).squeeze(1)
        medians = medians.squeeze(1)
        loss_deviation = deviations[0].maximum(SMALLEST_LOSS_DEVIATION * medians[0].abs())
        norm_deviation = deviations[1].clamp(min=SMALLEST_LOG_NORM_DEVIATION)
        limits = medians + self._threshold * torch.stack([loss_deviation, norm_deviation])
        return torch.where(self._seen >= config.warmup_steps, limits, math.inf)


def _comparable(decision: StepDecision) -> tuple[Tensor, Tensor]:
    """Return loss and logarithm of the norm, FP64 of shape (2,), and whether they can be compared.

    A norm of 0 has no finite logarithm.
    """
    values = torch.stack([decision.loss, decision.grad_norm.log()])
    return values, values.isfinite().all() & ~(decision.overflow | decision.empty)
