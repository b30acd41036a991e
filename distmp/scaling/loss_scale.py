"""The loss scale of a run, on the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from distmp.scaling.settings import LossScaleConfig

logger = logging.getLogger("distmp")


class LossScale:
    """The loss scale as a device tensor; it is equal on all ranks because its inputs are.

    Args:
        config: The update rules; None fixes the scale at 1.
        device: Device of the scale; the host never waits for it in an update.

    Attributes:
        config: The update rules; None if the scale is fixed at 1.
        value: The scale, 0-dim FP32; never 0, infinite or NaN.
        clean_steps: Number of consecutive steps without overflow since the last change, 0-dim
            int64.
        overflows_in_a_row: Number of consecutive steps with an overflow, 0-dim int64.

    Example:
        >>> import torch, distmp
        >>> from distmp.scaling.loss_scale import LossScale
        >>> scale = LossScale(distmp.LossScaleConfig(init=1024.0), torch.device("cpu"))
        >>> exhausted = scale.update(overflow=torch.tensor(True), empty=torch.tensor(False))
        >>> float(scale.value), bool(exhausted)
        (512.0, False)
    """

    def __init__(self, config: LossScaleConfig | None, device: torch.device) -> None:
        self.config = config
        scale = 1.0 if config is None else config.init
        self.value = torch.tensor(scale, dtype=torch.float32, device=device)
        self.clean_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.overflows_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def floor(self) -> float | None:
        """The lower limit of the scale; None if it is not dynamic."""
        return self.config.min_scale if self.config is not None and self.config.dynamic else None

    def update(self, overflow: Tensor, empty: Tensor) -> Tensor:
        """Update the scale after a step.

        Args:
            overflow: Whether a gradient of any rank was not finite, 0-dim bool.
            empty: Whether the step had no samples, 0-dim bool; such a step changes nothing.

        Returns:
            Whether a backoff was due but the scale cannot be lowered further, 0-dim bool.
        """
        if self.config is None or not self.config.dynamic:
            return torch.zeros_like(overflow)
        rules = self.config
        clean = self.clean_steps + 1
        grow = clean >= rules.growth_interval
        in_a_row = torch.where(overflow, self.overflows_in_a_row + 1, 0)
        back_off = in_a_row >= rules.hysteresis
        exhausted = back_off & (self.value <= rules.min_scale) & ~empty
        # In FP64, like torch's scaler: a factor such as 1.1 is not an FP32 number.
        exact = self.value.to(torch.float64)
        changed = torch.where(overflow | ~grow, exact, exact * rules.growth_factor)
        changed = torch.where(back_off, exact * rules.backoff_factor, changed)
        changed = changed.clamp(rules.min_scale, rules.max_scale).to(torch.float32)
        self.value = torch.where(empty, self.value, changed)
        clean = torch.where(overflow | grow, 0, clean)
        self.clean_steps = torch.where(empty, self.clean_steps, clean)
        self.overflows_in_a_row = torch.where(empty, self.overflows_in_a_row, in_a_row)
        return exhausted

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as 0-dim tensors; the value of a scale without rules is 0."""
        value = self.value if self.config is not None else torch.zeros_like(self.value)
        return {
            "value": value,
            "clean_steps": self.clean_steps,
            "overflows_in_a_row": self.overflows_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Tensor], *, quiet: bool = False) -> None:
        """Load a state as far as the configuration allows; log a scale that changes.

        A scale that is not dynamic does not change. A dynamic scale is clamped to its limits, and
        starts at `init` if the state is of a run without a loss scale; see
        `LossScaleConfig.restored`. Missing counts are 0.

        Args:
            state: A state returned by `state_dict`.
            quiet: Do not log, because another rank does.
        """
        if self.config is None:
            return
        stored = float(state["value"])
        self.value = torch.full_like(self.value, self.config.restored(stored))
        value = float(self.value)  # rounded to FP32, like the stored one
        if value != stored and stored > 0 and not quiet:
            logger.warning(
                "loss scale %g of the loaded state becomes %g because of precision.loss_scale",
                stored,
                value,
            )
        for name in ("clean_steps", "overflows_in_a_row"):
            count = torch.zeros_like(getattr(self, name))
            if 0 < stored < math.inf and name in state:
                count.copy_(state[name])
            setattr(self, name, count)
