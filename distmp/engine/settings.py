"""Settings of what happens between steps: `divergence`, `rank_consistency`, `precision.phases`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal

from distmp.errors import ConfigError
from distmp.utils.annotations import check_types

PHASES = "precision.phases"


@dataclass(frozen=True)
class DivergenceConfig:
    """Limits of loss and gradient norm, and the reaction to steps above them.

    Raises:
        ConfigError: For a value of the wrong type or out of range.

    Example:
        >>> DivergenceConfig(on_spike="rollback", loss_threshold=6).rolls_back
        True
    """

    on_spike: Literal["ignore", "warn", "skip", "rollback"] = "warn"
    """Reaction to a spike of loss or norm: "warn" logs it, "skip" skips the update, "rollback"
    returns to the last checkpoint and continues with the data after the spike."""

    on_nonfinite_loss: Literal["ignore", "warn", "skip", "rollback"] = "skip"
    """Reaction to a loss that is inf or NaN. Non-finite gradients are never applied."""

    loss_threshold: float = 10.0
    """A loss this many standard deviations above the median of the last 128 steps is a spike."""

    norm_threshold: float = 10.0
    """A gradient norm is a spike if its logarithm is this many standard deviations above the median
    of the last 128 steps."""

    warmup_steps: int = 100
    """Number of steps at the start of training that are never spikes."""

    max_rollbacks: int = 5
    """Maximum number of rollbacks of a run; the next one ends the run with an error."""

    skip_data_steps: int = 0
    """Steps of data after the spike that a rollback skips too."""

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
        """Whether any reaction is a rollback."""
        return "rollback" in (self.on_spike, self.on_nonfinite_loss)

    def _refuse(self, name: str, problem: str) -> None:
        raise ConfigError(f"divergence.{name}", getattr(self, name), problem)


@dataclass(frozen=True)
class RankConsistencyConfig:
    """When ranks compare replicated weights and state.

    Raises:
        ConfigError: For a value out of range.
    """

    every: int = 0
    """Number of steps between two comparisons of weights, their average (`ema`), optimizer state
    and loss scale; 0 disables them."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError("rank_consistency.every", self.every, "use 0 or more steps")


@dataclass(frozen=True)
class EmaConfig:
    """An exponential moving average (EMA) of the weights, in FP32."""

    decay: float = 0.0
    """Share of the average that an update keeps, such as 0.999; 0: no average. After each applied
    step, average = decay * average + (1 - decay) * weights. Takes 4 bytes per parameter, sharded
    like the weights."""

    warmup: bool = False
    """Use min(decay, (1 + n) / (10 + n)) in update n, so that the average of a short run forgets
    the initial weights."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(
                "ema.decay", self.decay, "use a number from 0 to below 1, such as 0.999"
            )
        if self.warmup and self.decay == 0:
            raise ConfigError("ema.warmup", True, "has no effect without ema.decay")


@dataclass(frozen=True)
class PrecisionPhase:
    """The policy until a number of tokens; see `precision.phases`.

    Raises:
        ConfigError: For a value of the wrong type or out of range.

    Example:
        >>> PrecisionPhase(until_tokens=1e9, policy="bf16").policy
        'bf16'
    """

    until_tokens: float
    """Tokens (or samples) that the loss counts over all ranks before the phase ends; inf: it does
    not end."""

    policy: str
    """The policy, which differs from that of the run only in forward, grad and wgrad."""

    def __post_init__(self) -> None:
        check_types(self, PHASES)
        if not self.until_tokens > 0:
            raise ConfigError(
                f"{PHASES}.until_tokens", self.until_tokens, "use a number above 0, or .inf"
            )


def parse_phases(entries: Sequence[Mapping[str, Any]]) -> tuple[PrecisionPhase, ...]:
    """Return the entries of the setting `precision.phases`.

    Raises:
        ConfigError: For an unknown or missing name, a wrong value, or a wrong order.
    """
    for entry in entries:
        if {*entry} != {field.name for field in fields(PrecisionPhase)}:
            example = "{until_tokens: 1e9, policy: bf16}"
            raise ConfigError(PHASES, entry, f"use until_tokens and policy, such as {example}")
    phases = tuple(PrecisionPhase(**entry) for entry in entries)
    check_order(phases)
    return phases


def check_order(phases: Sequence[PrecisionPhase]) -> None:
    """Check that phases end one after the other.

    Raises:
        ConfigError: If one ends no later than the one above it.
    """
    for above, phase in pairwise(phases):
        if phase.until_tokens <= above.until_tokens:
            raise ConfigError(
                f"{PHASES}.until_tokens",
                phase.until_tokens,
                f"is not above {above.until_tokens:g}, that of the phase above it; list phases in "
                "the order in which they end",
            )
