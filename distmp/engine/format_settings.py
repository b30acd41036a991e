"""Settings of formats that change during a run: `precision.phases` and `precision.guard`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal, NoReturn

from distmp.engine.settings import DivergenceConfig
from distmp.errors import ConfigError, nearest
from distmp.utils.annotations import check_types

PHASES = "precision.phases"
GUARD = "precision.guard"
# The products of a linear layer, in the order of all tensors about them.
PRODUCTS = ("forward", "grad", "wgrad")
_FORMATS = ("e4m3", "e5m2", "e2m1", "bf16")
_BEGINNINGS = ("after_steps", "after_tokens", "after_fraction")
_BEGIN = "give one of after_steps, after_tokens and after_fraction"
# Numbers of steps are exact in FP64, also in sums.
_MOST_STEPS = 2**40
_FIXED = (
    "is no part of a phase: phases change the formats of forward, grad and wgrad, and the rest of "
    "precision.policy is fixed for the run"
)


@dataclass(frozen=True)
class PrecisionPhase:
    """Formats of narrow products from some point of a run on.

    The first step of a phase is the one after so many steps, tokens, or part of the steps of the
    run; give one of the three. Of all phases that have begun, the last one in the list counts.

    Raises:
        ConfigError: For a value of the wrong type or out of range.

    Example:
        >>> PrecisionPhase(after_steps=900, forward="bf16").has_begun(step=900, weight=0.0)
        True
    """

    after_steps: int | None = None
    """Number of steps before the phase, skipped ones included."""

    after_tokens: float | None = None
    """Tokens (or samples) that the loss has counted before the phase, over all ranks. Counted up to
    the step before the last one, which the host knows without waiting for the device."""

    after_fraction: float | None = None
    """Part of the steps of the run before the phase, such as 0.9; for `distmp train`."""

    forward: str | None = None
    """Format of the forward product: e4m3, e5m2, e2m1 or bf16; None: that of the policy."""

    grad: str | None = None
    """Format of the product for the gradient of the input."""

    wgrad: str | None = None
    """Format of the product for the gradient of the weight."""

    def __post_init__(self) -> None:
        check_types(self, PHASES)
        given = {name: getattr(self, name) for name in _BEGINNINGS}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise ConfigError(PHASES, self.given, f"has {len(given) or 'no'} beginnings; {_BEGIN}")
        if self.after_steps is not None and self.after_steps < 0:
            self._refuse("after_steps", "use 0 or more steps")
        if self.after_tokens is not None and not 0 < self.after_tokens < math.inf:
            self._refuse("after_tokens", "use a number above 0")
        if self.after_fraction is not None and not 0 < self.after_fraction < 1:
            self._refuse("after_fraction", "use a number between 0 and 1, such as 0.9")
        for name in PRODUCTS:
            if getattr(self, name) not in (None, *_FORMATS):
                self._refuse(name, f"choose one of {', '.join(_FORMATS)}")

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def has_begun(self, step: int, weight: float) -> bool:
        """Return whether a step is in the phase or after it.

        Args:
            step: Number of steps before this one.
            weight: Sum of the global weights of steps before this one.
        """
        if self.after_steps is not None:
            return step >= self.after_steps
        return self.after_tokens is not None and weight >= self.after_tokens

    def _refuse(self, name: str, problem: str) -> NoReturn:
        raise ConfigError(f"{PHASES}.{name}", getattr(self, name), problem)


@dataclass(frozen=True)
class GuardConfig:
    """When narrow products are computed in bf16 for some steps.

    All ranks decide from sums over ranks. Products change two steps after the step with the cause,
    so that no host waits for its device, and change back after `steps` steps. Another cause within
    this interval starts it again.

    Raises:
        ConfigError: For a value of the wrong type or out of range.

    Example:
        >>> GuardConfig(saturated=0.001, widen="product").is_active
        True
    """

    saturated: float | None = None
    """Widen if more than this share of the values of an operand is saturated or not finite; null:
    not checked."""

    underflowed: float | None = None
    """Widen if more than this share of the values of an operand is rounded to zero; null: not
    checked."""

    on_spike: bool = False
    """Widen all products after a spike of loss or norm (see `divergence`), or a loss that is not
    finite."""

    widen: Literal["layer", "product", "policy"] = "layer"
    """What a share above its limit widens: the `product` of the operand, all products of the
    `layer`, or all products of all layers (`policy`)."""

    steps: int = 100
    """Number of steps with wide products."""

    def __post_init__(self) -> None:
        check_types(self, GUARD)
        for name in ("saturated", "underflowed"):
            share = getattr(self, name)
            if share is not None and not 0 <= share < 1:
                self._refuse(name, "use a share from 0 to below 1, or null")
        if self.widen not in ("layer", "product", "policy"):
            self._refuse("widen", nearest(str(self.widen), ["layer", "product", "policy"]))
        if not 1 <= self.steps <= _MOST_STEPS:
            self._refuse("steps", "use 1 or more steps, and at most 2^40")
        for field in fields(self):
            if not self.is_active and getattr(self, field.name) != field.default:
                self._refuse(field.name, "has no effect without saturated, underflowed or on_spike")

    @property
    def is_active(self) -> bool:
        """Whether anything is checked."""
        return self.on_spike or not (self.saturated is None and self.underflowed is None)

    def check(self, divergence: DivergenceConfig | None) -> None:
        """Refuse a guard without a limit, and `on_spike` if it has no effect.

        Args:
            divergence: The spike check; None without one.

        Raises:
            ConfigError: If there is no limit, spikes are not checked, or the run rolls back to a
                step before the spike.
        """
        if not self.is_active:
            raise ConfigError(
                GUARD,
                self,
                "never widens anything; set saturated (such as 0.001), underflowed or on_spike, or "
                "remove the guard",
            )
        if not self.on_spike:
            return
        if divergence is None or divergence.on_spike == "ignore":
            self._refuse("on_spike", "needs the spike check; set divergence.on_spike to warn")
        if divergence.rolls_back:
            self._refuse(
                "on_spike",
                "has no effect with a rollback, which returns to the formats before the spike; set "
                "divergence.on_spike and divergence.on_nonfinite_loss to warn or skip",
            )

    def _refuse(self, name: str, problem: str) -> NoReturn:
        raise ConfigError(f"{GUARD}.{name}", getattr(self, name), problem)


def parse_phases(entries: Sequence[Mapping[str, Any]]) -> tuple[PrecisionPhase, ...]:
    """Return the entries of the setting `precision.phases`.

    Raises:
        ConfigError: For an unknown name, or a value of the wrong type or out of range.
    """
    known = [field.name for field in fields(PrecisionPhase)]
    for entry in entries:
        for name, value in entry.items():
            if name not in known:
                raise ConfigError(f"{PHASES}.{name}", value, _unknown(name, known))
    phases = tuple(PrecisionPhase(**entry) for entry in entries)
    check_order(phases)
    return phases


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in ("from", "from_step", "from_steps", "step", "steps", "until", "after"):
        return f"unknown setting; {_BEGIN}"
    from_policy = ("policy", "preset", "scaling", "hp", "reduce", "compute", "param", "keep_fp32")
    return _FIXED if name in from_policy else f"unknown setting; {nearest(name, known)}"


def check_order(phases: Sequence[PrecisionPhase]) -> None:
    """Check that phases begin one after the other.

    Raises:
        ConfigError: If one begins no later than another one above it.
    """
    for name in _BEGINNINGS:
        latest: float | None = None
        for phase in phases:
            begins = getattr(phase, name)
            if begins is None:
                continue
            if latest is not None and begins <= latest:
                raise ConfigError(
                    PHASES,
                    phase.given,
                    f"begins no later than a phase above it ({name} = {latest}); list phases in "
                    "the order in which they begin",
                )
            latest = begins


def in_steps(phases: Sequence[PrecisionPhase], steps: int) -> tuple[PrecisionPhase, ...]:
    """Return the phases with `after_steps` in place of `after_fraction`.

    Args:
        phases: The phases.
        steps: Number of steps of the run.

    Raises:
        ConfigError: If a phase begins after the run, or no later than another one above it.
    """
    converted = tuple(
        phase
        if phase.after_fraction is None
        # Of the decimal number that the user wrote, not of the nearest binary one.
        else replace(
            phase,
            after_steps=math.ceil(Fraction(repr(phase.after_fraction)) * steps),
            after_fraction=None,
        )
        for phase in phases
    )
    for phase in converted:
        if phase.after_steps is not None and phase.after_steps >= steps:
            raise ConfigError(
                PHASES, phase.given, f"never begins: the run has {steps} steps; remove it"
            )
    check_order(converted)
    return converted


def refuse_fractions(phases: Sequence[PrecisionPhase]) -> None:
    """Refuse `after_fraction`, because the number of steps of a loop is unknown.

    Raises:
        ConfigError: If a phase has `after_fraction`.
    """
    for phase in phases:
        if phase.after_fraction is not None:
            raise ConfigError(
                f"{PHASES}.after_fraction",
                phase.after_fraction,
                "an engine does not know the number of steps of your loop; use after_steps",
            )


def active_phase(phases: Sequence[PrecisionPhase], step: int, weight: float) -> int:
    """Return the number of the phase of a step, counted from 1; 0 before the first one.

    Args:
        phases: The phases, without `after_fraction`.
        step: Number of steps before this one.
        weight: Sum of the global weights of steps before this one.
    """
    begun = [number for number, phase in enumerate(phases, 1) if phase.has_begun(step, weight)]
    return begun[-1] if begun else 0
