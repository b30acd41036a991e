"""Settings of the loss scale: section `precision.loss_scale`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from distmp.errors import require
from distmp.utils import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from distmp.utils.annotations import Section, consequential

# Number of clean steps before growth in runs of a few hundred steps.
SHORT_RUN_GROWTH_INTERVAL = 400


@dataclass(frozen=True)
class LossScaleConfig(Section, section="precision.loss_scale"):
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

    def _check(self) -> None:
        for name in ("init", "min_scale", "max_scale"):
            valid = SMALLEST_LOSS_SCALE <= getattr(self, name) <= LARGEST_LOSS_SCALE
            self._require(valid, name, "use a number from 2^-126 to 2^126")
        valid = 1 < self.growth_factor < math.inf
        self._require(valid, "growth_factor", "use a finite number above 1")
        self._require(0 < self.backoff_factor < 1, "backoff_factor", "use a number between 0 and 1")
        for name in ("growth_interval", "hysteresis"):
            self._require(getattr(self, name) >= 1, name, "use 1 or more steps")
        limits = f"min_scale {self.min_scale:g} and max_scale {self.max_scale:g}"
        valid = not self.dynamic or self.min_scale <= self.init <= self.max_scale
        self._require(valid, "init", f"must be between {limits}")

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
    rules = LossScaleConfig() if rules is None else rules
    problem = "pass distmp.LossScaleConfig(init=...), or fix it in the policy: loss_scale=128"
    require(isinstance(rules, LossScaleConfig), "loss_scale", rules, problem)
    if scale is None:
        return None
    if scale == "dynamic":
        return rules
    problem = f"the policy fixes the loss scale at {scale:g}; remove one of the two settings"
    fits = rules.init in (LossScaleConfig.init, scale)
    require(fits, "precision.loss_scale.init", rules.init, problem)
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
