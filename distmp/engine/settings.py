"""Sections of a run that its engine uses: `divergence`, `rank_consistency`, `ema`, phases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal

from distmp.errors import ConfigError, require
from distmp.utils.annotations import Section

PHASES = "precision.phases"


@dataclass(frozen=True)
class DivergenceConfig(Section, section="divergence"):
    """Limits of loss and gradient norm, and the reaction to steps above them.

    Raises:
        ConfigError: For a value of the wrong type or out of range.

    Example:
        >>> DivergenceConfig(on_spike="rollback", threshold=6).rolls_back
        True
    """

    on_spike: Literal["ignore", "warn", "skip", "rollback"] = "warn"
    """Reaction to a spike of loss or norm: "warn" logs it, "skip" skips the update, "rollback"
    returns to the last checkpoint and continues with the data after the spike. A step with a loss
    that is inf or NaN is rolled back under "rollback", and skipped otherwise."""

    threshold: float = 10.0
    """A loss, or the logarithm of a gradient norm, is a spike if it is this many standard
    deviations above the median of the last 128 steps."""

    warmup_steps: int = 100
    """Number of steps at the start of training that are never spikes."""

    def _check(self) -> None:
        self._require(0 < self.threshold < math.inf, "threshold", "use a number above 0")
        self._require(self.warmup_steps >= 1, "warmup_steps", "use 1 or more steps")

    @property
    def rolls_back(self) -> bool:
        """Whether a spike causes a rollback."""
        return self.on_spike == "rollback"


@dataclass(frozen=True)
class RankConsistencyConfig(Section, section="rank_consistency"):
    """When ranks compare replicated weights and state; a difference ends the run.

    Raises:
        ConfigError: For a value out of range.
    """

    every: int = 0
    """Number of steps between two comparisons of weights, their average (`ema`), optimizer state
    and loss scale; 0 disables them."""

    def _check(self) -> None:
        self._require(self.every >= 0, "every", "use 0 or more steps")


@dataclass(frozen=True)
class EmaConfig(Section, section="ema"):
    """An exponential moving average (EMA) of the weights, in FP32.

    Example:
        >>> from distmp.engine.settings import EmaConfig
        >>> EmaConfig(decay=0.999).decay
        0.999
    """

    decay: float = 0.0
    """Share of the average that an update keeps, such as 0.999; 0: no average. After each applied
    step, average = decay * average + (1 - decay) * weights. Takes 4 bytes per parameter, sharded
    like the weights."""

    def _check(self) -> None:
        self._require(0 <= self.decay < 1, "decay", "use a number from 0 to below 1, such as 0.999")


@dataclass(frozen=True)
class PrecisionPhase(Section, section=PHASES):
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

    def _check(self) -> None:
        self._require(self.until_tokens > 0, "until_tokens", "use a number above 0, or .inf")


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
        tokens = phase.until_tokens
        problem = (
            f"is not above {above.until_tokens:g}, that of the phase above it; list phases in "
            "the order in which they end"
        )
        require(tokens > above.until_tokens, f"{PHASES}.until_tokens", tokens, problem)
