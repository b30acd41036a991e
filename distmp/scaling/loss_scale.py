"""The loss scale and the rules by which it follows overflows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distmp.errors import ConfigError


@dataclass(frozen=True)
class LossScaleConfig:
    """Rules of a dynamic loss scale (Micikevicius et al. 2018, section 3.2)."""

    init: float = 2.0**16
    """Scale of the first step."""
    growth_factor: float = 2.0
    """Factor after `growth_interval` consecutive steps without overflow."""
    backoff_factor: float = 0.5
    """Factor after a step with an overflow."""
    growth_interval: int = 2000
    """Consecutive clean steps before the scale grows."""
    min_scale: float = 1.0
    """The scale never sinks below this."""
    max_scale: float = 2.0**24
    """The scale never grows above this."""

    def __post_init__(self) -> None:
        section = "precision.loss_scale"
        for name in ("init", "min_scale", "max_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{section}.{name}", value, "use a positive finite number")
        if not 1 < self.growth_factor < math.inf:
            raise ConfigError(
                f"{section}.growth_factor", self.growth_factor, "use a finite number above 1"
            )
        if not 0 < self.backoff_factor < 1:
            raise ConfigError(
                f"{section}.backoff_factor", self.backoff_factor, "use a number between 0 and 1"
            )
        if self.growth_interval < 1:
            raise ConfigError(
                f"{section}.growth_interval", self.growth_interval, "use 1 or more steps"
            )
        if not self.min_scale <= self.init <= self.max_scale:
            raise ConfigError(
                f"{section}.init",
                self.init,
                f"must lie between min_scale {self.min_scale} and max_scale {self.max_scale}",
            )


class LossScale:
    """The scale of the loss as a device tensor, equal on every rank because its inputs are.

    Args:
        config: The rules, or None for a scale that is 1 for ever.
        device: Where the scale is used; updating it never waits for the device.

    Attributes:
        value: The scale, 0-dim FP32.
        clean_steps: Consecutive applied steps since the last change, 0-dim int64.
    """

    def __init__(self, config: LossScaleConfig | None, device: torch.device) -> None:
        self.config = config
        self.value = torch.tensor(1.0 if config is None else config.init, device=device)
        self.clean_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, overflow: Tensor, empty: Tensor) -> None:
        """Follow one step.

        Args:
            overflow: 0-dim bool, whether a gradient of any rank was not finite.
            empty: 0-dim bool, whether the step had nothing to learn from; it changes nothing.
        """
        if self.config is None:
            return
        rules = self.config
        clean = self.clean_steps + 1
        grow = clean >= rules.growth_interval
        after_clean = torch.where(grow, self.value * rules.growth_factor, self.value)
        changed = torch.where(overflow, self.value * rules.backoff_factor, after_clean)
        changed = changed.clamp(rules.min_scale, rules.max_scale)
        self.value = torch.where(empty, self.value, changed)
        self.clean_steps = torch.where(
            empty, self.clean_steps, torch.where(overflow | grow, 0, clean)
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as 0-dim tensors; a scale without rules has the value 0 in it."""
        value = self.value if self.config is not None else torch.zeros_like(self.value)
        return {"value": value, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state; the configured limits hold for it too.

        Without rules the scale stays 1; with rules it starts anew after a run that had none.
        """
        if self.config is None:
            return
        value = state["value"].to(self.value)
        followed = value > 0
        limited = value.clamp(self.config.min_scale, self.config.max_scale)
        self.value = torch.where(followed, limited, self.config.init)
        self.clean_steps = state["clean_steps"].to(self.clean_steps) * followed
