"""The loss scale and the rules by which it follows overflows."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.utils.annotations import check_types
from distmp.utils.resume_rules import consequential

logger = logging.getLogger("distmp")

# Within these the scale and its reciprocal are normal FP32 numbers, so neither is ever 0 or inf.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


@dataclass(frozen=True)
class LossScaleConfig:
    """Rules of a loss scale (Micikevicius et al. 2018, section 3.2).

    Raises:
        ConfigError: For a number that cannot work.

    Example:
        >>> LossScaleConfig(init=2.0**12, hysteresis=2).max_scale
        16777216.0
    """

    dynamic: bool = True
    """Follow overflows; false keeps the scale at `init` for ever."""
    init: float = field(
        default=2.0**16, metadata=consequential("the loss scale continues from its current value")
    )
    """Scale of the first step."""
    growth_factor: float = 2.0
    """Factor after `growth_interval` consecutive steps without overflow."""
    backoff_factor: float = 0.5
    """Factor after `hysteresis` consecutive steps with an overflow, and after each further one."""
    growth_interval: int = 2000
    """Consecutive clean steps before the scale grows."""
    hysteresis: int = 1
    """Consecutive overflows up to a backoff; 1 backs off at the first."""
    min_scale: float = 1.0
    """The scale never sinks below this; an overflow that would lower it further ends the run."""
    max_scale: float = 2.0**24
    """The scale never grows above this."""

    def __post_init__(self) -> None:
        check_types(self, "precision.loss_scale")
        for name in ("init", "min_scale", "max_scale"):
            if not SMALLEST_SCALE <= getattr(self, name) <= LARGEST_SCALE:
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
            self._refuse("init", f"must lie between {limits}")

    def _refuse(self, name: str, problem: str) -> None:
        raise ConfigError(f"precision.loss_scale.{name}", getattr(self, name), problem)


def loss_scale_rules(
    wanted: Literal["dynamic"] | float | None, rules: LossScaleConfig | None
) -> LossScaleConfig | None:
    """Return the rules that a policy's `loss_scale` stands for; None for a scale of 1 for ever.

    Args:
        wanted: What the policy says: "dynamic", a number for ever, or nothing.
        rules: The rules of a dynamic scale; None takes the defaults.

    Raises:
        ConfigError: If policy and rules name two different scales.
    """
    rules = rules or LossScaleConfig()
    if wanted is None:
        return None
    if wanted == "dynamic":
        return rules
    if rules.init not in (LossScaleConfig.init, wanted):
        raise ConfigError(
            "precision.loss_scale.init",
            rules.init,
            f"the policy has the scale {wanted:g} for ever; leave one of the two out",
        )
    return replace(rules, dynamic=False, init=float(wanted))


def unused_rules(
    wanted: Literal["dynamic"] | float | None, rules: LossScaleConfig | None
) -> str | None:
    """Return the rules that were set and have no effect, and why; None if there are none.

    They are no error: one file with rules for float16 serves all policies.

    Args:
        wanted: What the policy says, as for `loss_scale_rules`.
        rules: As they were set; None: not at all.
    """
    used = loss_scale_rules(wanted, rules)
    if rules is None or (used is not None and used.dynamic):
        return None
    known = () if used is None else ("dynamic", "init")
    unused = [
        f"{field.name} = {getattr(rules, field.name)!r}"
        for field in fields(rules)
        if field.name not in known and getattr(rules, field.name) != field.default
    ]
    why = "there is no loss scale" if used is None else f"the loss scale is {used.init:g} for ever"
    return f"precision.loss_scale.{', '.join(unused)}: has no effect, {why}" if unused else None


class LossScale:
    """The scale of the loss as a device tensor, equal on every rank because its inputs are.

    Args:
        config: The rules, or None for a scale that is 1 for ever.
        device: Where the scale is used; updating it never waits for the device.

    Attributes:
        value: The scale, 0-dim FP32; never 0, infinite or NaN.
        clean_steps: Consecutive steps without overflow since the last change, 0-dim int64.
        overflows_in_a_row: Consecutive steps with an overflow, 0-dim int64.
    """

    def __init__(self, config: LossScaleConfig | None, device: torch.device) -> None:
        self.config = config
        self.value = torch.tensor(1.0 if config is None else config.init, device=device)
        self.clean_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.overflows_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def floor(self) -> float | None:
        """The value that overflows cannot push the scale below; None if they do not move it."""
        return self.config.min_scale if self.config is not None and self.config.dynamic else None

    def update(self, overflow: Tensor, empty: Tensor) -> Tensor:
        """Follow one step.

        Args:
            overflow: 0-dim bool, whether a gradient of any rank was not finite.
            empty: 0-dim bool, whether the step had nothing to learn from; it changes nothing.

        Returns:
            0-dim bool, whether a backoff was due but the scale stood at its minimum already: no
            scale that the rules allow lets this step through.
        """
        if self.config is None or not self.config.dynamic:
            return torch.zeros_like(overflow)
        rules = self.config
        clean = self.clean_steps + 1
        grow = clean >= rules.growth_interval
        in_a_row = torch.where(overflow, self.overflows_in_a_row + 1, 0)
        back_off = in_a_row >= rules.hysteresis
        exhausted = back_off & (self.value <= rules.min_scale) & ~empty
        # In FP64, as torch's scaler multiplies: a factor such as 1.1 is no FP32 number.
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
        """Return the state as 0-dim tensors; a scale without rules has the value 0 in it."""
        value = self.value if self.config is not None else torch.zeros_like(self.value)
        return {
            "value": value,
            "clean_steps": self.clean_steps,
            "overflows_in_a_row": self.overflows_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Tensor], *, quiet: bool = False) -> None:
        """Continue from a state as far as the configuration allows; say where it does not.

        Without rules the scale stays 1, a static one stays what it is. A dynamic one keeps within
        its limits, and starts anew after a run that had none. Counts that are not there are 0.

        Args:
            state: As `state_dict` returns it.
            quiet: Leave it to another rank to say something.
        """
        if self.config is None:
            return
        stored = float(state["value"])
        self.value = torch.full_like(self.value, self._allowed(stored))
        value = float(self.value)  # rounded to FP32, as the stored one is
        if value != stored and stored > 0 and not quiet:
            logger.warning(
                "loss scale %g of the loaded state becomes %g, as precision.loss_scale says",
                stored,
                value,
            )
        for name in ("clean_steps", "overflows_in_a_row"):
            count = torch.zeros_like(getattr(self, name))
            if stored > 0 and name in state:
                count.copy_(state[name])
            setattr(self, name, count)

    def _allowed(self, value: float) -> float:
        """Return the scale to continue with after one of `value` (0 or NaN: there was none)."""
        assert self.config is not None
        if not self.config.dynamic or not value > 0:
            return self.config.init
        return min(max(value, self.config.min_scale), self.config.max_scale)
