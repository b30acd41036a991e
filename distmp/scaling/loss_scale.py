"""The loss scale and its update rules."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.precision.policy import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from distmp.utils.annotations import check_types
from distmp.utils.resume_rules import consequential

logger = logging.getLogger("distmp")

# Number of clean steps before growth in runs of a few hundred steps.
SHORT_RUN_GROWTH_INTERVAL = 400


@dataclass(frozen=True)
class LossScaleConfig:
    """Update rules of a loss scale (Micikevicius et al. 2018, section 3.2).

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> LossScaleConfig(init=2.0**12, hysteresis=2).max_scale
        16777216.0
    """

    dynamic: bool = True
    """Update the scale after overflows and clean steps; false fixes it at `init`."""
    init: float = field(
        default=2.0**16, metadata=consequential("the loss scale continues from its current value")
    )
    """Loss scale of the first step."""
    growth_factor: float = 2.0
    """Factor by which the scale is multiplied after `growth_interval` consecutive steps without
    overflow."""
    backoff_factor: float = 0.5
    """Factor by which the scale is multiplied after `hysteresis` consecutive overflows, and after
    each further one."""
    growth_interval: int = 2000
    """Number of consecutive steps without overflow before the scale grows."""
    hysteresis: int = 1
    """Number of consecutive overflows before a backoff; 1 backs off at the first one."""
    min_scale: float = 1.0
    """Lower limit of the scale; training ends at an overflow that would lower it further."""
    max_scale: float = 2.0**24
    """Upper limit of the scale."""

    def __post_init__(self) -> None:
        check_types(self, "precision.loss_scale")
        for name in ("init", "min_scale", "max_scale"):
            if not SMALLEST_LOSS_SCALE <= getattr(self, name) <= LARGEST_LOSS_SCALE:
                self._refuse(name, "use a number from 2^-126 to 2^126")
        if not 1 < self.growth_factor < math.inf:
            self._refuse("growth_factor", "use a finite number above 1")
        if not 0 < self.backoff_factor < 1:
            self._refuse("backoff_factor", "use a number between 0 and 1")
        for name in ("growth_interval", "hysteresis"):
            if getattr(self, name) < 1:
                self._refuse(name, "use 1 or more steps")
        if self.dynamic and not self.min_scale <= self.init <= self.max_scale:
            limits = f"min_scale {self.min_scale:g} and max_scale {self.max_scale:g}"
            self._refuse("init", f"must be between {limits}")

    @classmethod
    def for_short_runs(cls, **changes: Any) -> LossScaleConfig:
        """Return rules for runs of a few hundred steps, such as reinforcement learning.

        The scale grows after 400 clean steps. With the default of 2000, the scale of a short run
        can only fall: after a few early overflows, small gradients round to zero until its end.

        Args:
            **changes: Other fields.

        Example:
            >>> LossScaleConfig.for_short_runs(init=2.0**14).growth_interval
            400
        """
        return cls(**{"growth_interval": SHORT_RUN_GROWTH_INTERVAL, **changes})

    def restored(self, value: float) -> float:
        """Return the scale to continue with after a loaded one.

        A dynamic scale is clamped to its limits. An invalid one (0, negative, infinite or NaN) says
        nothing about the gradients, so the scale starts at `init`; clamping infinity to `max_scale`
        would skip steps until it has backed off.
        """
        if not (self.dynamic and 0 < value < math.inf):
            return self.init
        return min(max(value, self.min_scale), self.max_scale)

    def _refuse(self, name: str, problem: str) -> None:
        raise ConfigError(f"precision.loss_scale.{name}", getattr(self, name), problem)


def loss_scale_rules(
    scale: Literal["dynamic"] | float | None, rules: LossScaleConfig | None
) -> LossScaleConfig | None:
    """Return the rules of a policy's `loss_scale`; None if the scale is fixed at 1.

    Args:
        scale: The policy's value: "dynamic", a fixed number, or None.
        rules: The rules of a dynamic scale; None uses the defaults.

    Raises:
        ConfigError: If policy and rules name two different scales.
    """
    rules = rules or LossScaleConfig()
    if scale is None:
        return None
    if scale == "dynamic":
        return rules
    if rules.init not in (LossScaleConfig.init, scale):
        raise ConfigError(
            "precision.loss_scale.init",
            rules.init,
            f"the policy fixes the loss scale at {scale:g}; remove one of the two settings",
        )
    return replace(rules, dynamic=False, init=float(scale))


def unused_rules(
    scale: Literal["dynamic"] | float | None, rules: LossScaleConfig | None
) -> str | None:
    """Return a message on configured rules that have no effect; None if there are none.

    This is not an error, so that one file with rules for float16 can be used with all policies.

    Args:
        scale: The policy's value, as for `loss_scale_rules`.
        rules: The configured rules; None if there are none.
    """
    used = loss_scale_rules(scale, rules)
    if rules is None or (used is not None and used.dynamic):
        return None
    known = () if used is None else ("dynamic", "init")
    unused = [
        f"{field.name} = {getattr(rules, field.name)!r}"
        for field in fields(rules)
        if field.name not in known and getattr(rules, field.name) != field.default
    ]
    reason = (
        "there is no loss scale" if used is None else f"the loss scale is fixed at {used.init:g}"
    )
    return f"precision.loss_scale.{', '.join(unused)}: has no effect, {reason}" if unused else None


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
    """

    def __init__(self, config: LossScaleConfig | None, device: torch.device) -> None:
        self.config = config
        self.value = torch.tensor(1.0 if config is None else config.init, device=device)
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
