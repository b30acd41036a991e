"""Whether a step's loss or norm is out of bounds, judged by the steps before it.

The bounds are robust: the median of a window of steps and the median absolute deviation from it
(MAD; Hampel 1974), which up to half of the window cannot spoil. A loss is taken as it is, since
losses may be negative; a norm by its logarithm, since norms spread by factors.

    limit = median + threshold * max(1.4826 * MAD, smallest deviation)

1.4826 MAD is the standard deviation where values are normally distributed. Everything is a small
FP64 tensor on the device, so that a step can be skipped without a host wait, and is computed from
what all ranks have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.scaling.step_decision import StepDecision
from distmp.utils.annotations import check_types

# Steps that the bounds are taken from.
WINDOW = 128
# Of a normal distribution: standard deviation / median absolute deviation.
DEVIATION_OF_MAD = 1.4826
# Smaller deviations count as these, or every step would stand out of a window of equal ones: of the
# loss, as a share of its median; of the logarithm of the norm.
SMALLEST_LOSS_DEVIATION = 0.01
SMALLEST_LOG_NORM_DEVIATION = 0.05


@dataclass(frozen=True)
class DivergenceConfig:
    """What is done about a loss or a norm that is out of bounds.

    Raises:
        ConfigError: For a word or a number that cannot work.

    Example:
        >>> DivergenceConfig(on_spike="rollback", loss_threshold=6).rolls_back
        True
    """

    on_spike: Literal["ignore", "warn", "skip", "rollback"] = "warn"
    """After a spike of loss or norm: say so, leave the update out, or go back to the last
    checkpoint and on with the data behind the spike."""

    on_nonfinite_loss: Literal["ignore", "warn", "skip", "rollback"] = "skip"
    """The same for a loss that is inf or NaN. Gradients that are not finite are never applied."""

    loss_threshold: float = 10.0
    """A loss so many standard deviations above the median of the last 128 steps is a spike."""

    norm_threshold: float = 10.0
    """The same for the norm of the gradient, by its logarithm."""

    warmup_steps: int = 100
    """Steps from the start of training in which nothing is a spike."""

    max_rollbacks: int = 5
    """Rollbacks of a run; the next one would end it."""

    skip_data_steps: int = field(default=0, metadata={"formerly": "pass_over"})
    """Steps of data behind the spike that a rollback passes over as well."""

    def __post_init__(self) -> None:
        check_types(self, "divergence")
        for name in ("on_spike", "on_nonfinite_loss"):
            if getattr(self, name) not in ("ignore", "warn", "skip", "rollback"):
                self._refuse(name, "use ignore, warn, skip or rollback")
        for name in ("loss_threshold", "norm_threshold"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                self._refuse(name, "use a number above 0")
        if self.warmup_steps < 1:
            self._refuse("warmup_steps", "use 1 or more steps")
        for name in ("max_rollbacks", "skip_data_steps"):
            if getattr(self, name) < 0:
                self._refuse(name, "use 0 or more")

    @property
    def rolls_back(self) -> bool:
        """Whether anything leads to a rollback."""
        return "rollback" in (self.on_spike, self.on_nonfinite_loss)

    def _refuse(self, name: str, problem: str) -> None:
        raise ConfigError(f"divergence.{name}", getattr(self, name), problem)


class SpikeCheck(NamedTuple):
    """What the guard says about a step; 0-dim tensors on the device.

    Attributes:
        spike: bool, whether loss or norm are above their limits.
        skip: bool, whether the update has to be left out.
        loss_limit: FP64, infinite in the warm-up.
        norm_limit: FP64, infinite in the warm-up.
    """

    spike: Tensor
    skip: Tensor
    loss_limit: Tensor
    norm_limit: Tensor


class DivergenceGuard:
    """Judges steps, and remembers them to check the next ones.

    Steps with an overflow, without any weight, or with a loss that is not finite are not
    remembered; spikes are, so that the bounds follow a run that stays at a new level.

    Args:
        config: The rules; None finds nothing and costs nothing.
        device: Where the numbers of a step are.
    """

    def __init__(self, config: DivergenceConfig | None, device: torch.device) -> None:
        self.config = config
        # Losses and logarithms of norms, the latest last, and how many steps were ever remembered.
        self._values = torch.zeros(2, WINDOW, dtype=torch.float64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)
        if config is not None:
            # Made once: a tensor from Python numbers makes the host wait for a device.
            self._thresholds = torch.tensor(
                [config.loss_threshold, config.norm_threshold], dtype=torch.float64, device=device
            )
            self._places = torch.arange(WINDOW, device=device)
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self._infinite = torch.full((2,), math.inf, dtype=torch.float64, device=device)
        self._limits = self._infinite

    def check(self, decision: StepDecision) -> SpikeCheck:
        """Judge a step before its update; the host does not wait."""
        config = self.config
        if config is None:
            return SpikeCheck(self._never, self._never, *self._infinite.unbind())
        spike = self._never
        if config.on_spike != "ignore":
            spike = (_values(decision) > self._limits).any() & _usable(decision)
        skip = spike if config.on_spike == "skip" else self._never
        if config.on_nonfinite_loss == "skip":
            skip = skip | ~decision.loss.isfinite()
        return SpikeCheck(spike, skip, self._limits[0], self._limits[1].exp())

    def remember(self, decision: StepDecision) -> None:
        """Let a step count for the bounds of those after it."""
        if self.config is None:
            return
        usable = _usable(decision)
        moved = torch.cat([self._values[:, 1:], _values(decision)[:, None]], 1)
        # In place: the state that a checkpoint was read into stays the live one.
        self._values.copy_(torch.where(usable, moved, self._values))
        self._seen += usable
        self._limits = self._find_limits(self.config)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state: the same names and shapes whatever the rules."""
        return {"values": self._values, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state with the names of `state_dict`."""
        self._values.copy_(state["values"])
        self._seen.copy_(state["seen"])
        self._limits = self._infinite if self.config is None else self._find_limits(self.config)

    def _find_limits(self, config: DivergenceConfig) -> Tensor:
        """Return the limits of the loss and of the logarithm of the norm, FP64 of shape (2,)."""
        count = self._seen.clamp(max=WINDOW)
        absent = self._places < WINDOW - count
        # The lower one of two middle values, as torch.median takes it.
        middle = ((count - 1).clamp(min=0) // 2).expand(2, 1)

        def median(values: Tensor) -> Tensor:
            in_order = torch.where(absent, math.inf, values).sort(1).values
            return in_order.gather(1, middle)

        medians = median(self._values)
        deviations = DEVIATION_OF_MAD * median((self._values - medians).abs()).squeeze(1)
        medians = medians.squeeze(1)
        loss_deviation = deviations[0].maximum(SMALLEST_LOSS_DEVIATION * medians[0].abs())
        norm_deviation = deviations[1].clamp(min=SMALLEST_LOG_NORM_DEVIATION)
        limits = medians + self._thresholds * torch.stack([loss_deviation, norm_deviation])
        return torch.where(self._seen >= config.warmup_steps, limits, math.inf)


def _values(decision: StepDecision) -> Tensor:
    return torch.stack([decision.loss, decision.grad_norm.log()])


def _usable(decision: StepDecision) -> Tensor:
    """Whether loss and norm are numbers to compare; a norm of 0 has no logarithm."""
    return _values(decision).isfinite().all() & ~(decision.overflow | decision.empty)
