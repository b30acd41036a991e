"""Changes the formats of narrow products between steps: by phases, and by a guard.

The formats of a step depend only on the number of steps before it and on the state that checkpoints
hold, and that is the same on all ranks.
"""

# Note [When formats change]
#
# The host chooses the formats of a step when it launches the step, and must not wait for the device
# then. Sums over ranks (the guard's decision, the number of tokens) are on the device. The host
# reads those of step t after it has launched step t + 1, when step t has usually ended, and they
# count from step t + 2 on. This number is fixed: a CPU, which never waits, also counts them from
# step t + 2 on, so that devices and ranks change formats at the same step.
#
# A state after step t + 1 holds the sums after steps t and t + 1, so that a run continues with the
# same formats.

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distmp.engine.config import EngineConfig
from distmp.engine.format_guard import FormatGuard, cause_text
from distmp.engine.format_settings import (
    GUARD,
    PHASES,
    PRODUCTS,
    GuardConfig,
    PrecisionPhase,
    active_phase,
)
from distmp.errors import CheckpointError, ConfigError, listed
from distmp.precision.policy import PrecisionPolicy
from distmp.quantization import NarrowLayers, ProductFormats
from distmp.quantization.layers import product_formats
from distmp.scaling import StepDecision
from distmp.utils.host_copy import HostCopy

logger = logging.getLogger("distmp")

# Versions of a compiled block: a block of seven layers of which some are wide has up to 2^7.
RECOMPILE_LIMIT = 128

_WEIGHT = "weight"
_UNTIL = "wide_until/"
_CAUSES = "causes/"


class StepFormats(NamedTuple):
    """The formats of a step.

    Attributes:
        phase: Number of the phase, counted from 1; 0: the formats of the policy.
        widened: Number of products that the guard has widened.
        changes: What changed with this step, as text; empty if nothing did.
    """

    phase: int
    widened: int
    changes: tuple[str, ...] = ()


class _Sums(NamedTuple):
    """Copies on the host after a step: the total weight, the guard's decision and its causes."""

    weight: float
    wide_until: list[list[int]]
    causes: list[list[int]]


class FormatSchedule:
    """Sets the formats of narrow products for each step.

    Args:
        layers: The layers with narrow products.
        policy: The policy.
        phases: The phases, without `after_fraction`.
        guard: The guard; None for none.
        quiet: Do not log changes; True on all ranks but rank 0.
    """

    def __init__(
        self,
        layers: NarrowLayers,
        policy: PrecisionPolicy,
        phases: Sequence[PrecisionPhase],
        guard: GuardConfig | None,
        *,
        quiet: bool,
    ) -> None:
        self._layers = layers
        self._names = [*layers.modules]
        self._phases = phases
        self._formats = phase_formats(policy, phases)
        device = layers.counts.device
        self._guard: FormatGuard | None = None
        if guard is not None and guard.is_active:
            self._guard = FormatGuard(guard, len(self._names), device)
        self._needs_weight = any(phase.after_tokens is not None for phase in phases)
        # Sum of the global weights of all steps but the last one, and of all steps.
        self._weights = torch.zeros(2, dtype=torch.float64, device=device)
        self._quiet = quiet
        self._phase = 0
        self._widened: dict[str, tuple[str, ...]] = {}
        self._wide_until = 0
        self._causes: list[list[int]] = []
        self._last = StepFormats(0, 0)
        self._last_widened: dict[str, tuple[str, ...]] = {}
        # The sums after the last step.
        self._copy: HostCopy | None = None
        self.continue_from(0)

    @property
    def changes_formats(self) -> bool:
        """Whether formats may change during the run."""
        return bool(self._phases) or self._guard is not None

    def begin_step(self, step: int) -> StepFormats:
        """Return the formats of a step, and log what changed.

        Args:
            step: Number of steps before this one.
        """
        formats = StepFormats(self._phase, sum(map(len, self._widened.values())))
        changes = [*self._changes(step)]
        self._last, self._last_widened = formats, self._widened
        for change in changes if not self._quiet else ():
            logger.warning("%s", change)
        return formats._replace(changes=tuple(changes))

    def end_step(self, taken: int, sums: Tensor, decision: StepDecision, spike: Tensor) -> None:
        """Set the formats of the next step.

        Args:
            taken: Number of steps taken, this one included.
            sums: Saturated, underflowed and all values of each layer and operand, over all ranks,
                FP64 [layers, 5, 3].
            decision: The decision on this step.
            spike: Whether loss or norm are above their limits, 0-dim bool.
        """
        self._weights[0] = self._weights[1]
        self._weights[1] += decision.weight.nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
        if self._guard is not None:
            not_finite = ~(decision.loss.isfinite() | decision.empty)
            self._guard.end_step(sums, spike | not_finite, taken)
        before, self._copy = self._copy, self._copied(1)
        self._set_formats(taken, self._read(before))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state; the names of a guard's state contain those of layers."""
        state = {_WEIGHT: self._weights}
        if self._guard is not None:
            for index, name in enumerate(self._names):
                state[f"{_UNTIL}{name}"] = self._guard.wide_until[index]
                state[f"{_CAUSES}{name}"] = self._guard.causes[index]
        return state

    def reset(self, names: Sequence[str]) -> None:
        """Reset what a stored state lacks, because it was written under another policy or guard.

        Raises:
            CheckpointError: If a phase needs it.
        """
        state = self.state_dict()
        for name in names:
            # A later state must not pass for a complete count.
            state[name].fill_(math.nan if name == _WEIGHT else 0)
        self._check_weight()

    def _check_weight(self) -> None:
        if self._needs_weight and bool(self._weights.isnan().any()):
            raise CheckpointError(
                f"{PHASES}.after_tokens: the state lacks the number of tokens consumed, which a "
                "policy without narrow products does not count; use after_steps"
            )

    def continue_from(self, taken: int) -> None:
        """Set the formats of the next step, from the live state.

        Args:
            taken: Number of steps taken.
        """
        self._check_weight()
        self._copy = self._copied(1)
        sums = self._read(self._copied(0))
        self._set_formats(taken, sums)
        # What ends with the next step was wide in the last one, perhaps of another process.
        before = _widened(self._names, sums.wide_until, max(taken - 1, 0))
        self._last_widened = _without(before, self._widened) | self._last_widened

    def _copied(self, row: int) -> HostCopy | None:
        """Copy the sums after the last step (1), or after the one before it (0), to the host."""
        if self._guard is None:
            return HostCopy(self._weights[row : row + 1].clone()) if self._needs_weight else None
        decisions = torch.stack([self._guard.wide_until[:, row], self._guard.causes[:, row]])
        sums = [self._weights[row : row + 1], decisions.flatten().to(torch.float64)]
        return HostCopy(torch.cat(sums))

    def _read(self, copy: HostCopy | None) -> _Sums:
        if copy is None:
            return _Sums(0.0, [], [])
        weight, *values = copy.read()
        numbers, count = [int(value) for value in values], len(PRODUCTS)
        rows = [numbers[i : i + count] for i in range(0, len(numbers), count)]
        layers = len(rows) // 2
        return _Sums(weight, rows[:layers], rows[layers:])

    def _set_formats(self, step: int, sums: _Sums) -> None:
        self._causes = sums.causes
        phase = active_phase(self._phases, step, sums.weight)
        widened = _widened(self._names, sums.wide_until, step)
        if (phase, widened) == (self._phase, self._widened):
            return
        self._phase, self._widened = phase, widened
        self._wide_until = max((until for row in sums.wide_until for until in row), default=0)
        formats = self._formats[phase]
        self._layers.set_formats(
            {name: _wide(formats, widened.get(name, ())) for name in self._names}
        )

    def _changes(self, step: int) -> list[str]:
        """Return what is different from the last step, as text; steps are counted from 1."""
        changes = []
        if self._phase != self._last.phase:
            words = _words(self._formats[self._phase])
            changes.append(f"{PHASES}: from step {step + 1} on, the formats are {words}")
        if added := _without(self._widened, self._last_widened):
            cause = self._cause(added) or "the state of the checkpoint"
            changes.append(
                f"{GUARD}: from step {step + 1} to {self._wide_until} at least, bf16 replaces the "
                f"formats of {_described(added)}, because of {cause}"
            )
        if ended := _without(self._last_widened, self._widened):
            cause = self._cause(ended)
            changes.append(
                f"{GUARD}: from step {step + 1} on, {_described(ended)} are narrow again"
                + (f"; they were wide because of {cause}" if cause else "")
            )
        return changes

    def _cause(self, widened: Mapping[str, tuple[str, ...]]) -> str:
        """Return why products were widened, as text; empty if the state does not say so."""
        of_layer = dict(zip(self._names, self._causes, strict=True))
        causes = [
            of_layer[name][PRODUCTS.index(product)]
            for name, products in widened.items()
            for product in products
        ]
        return cause_text(reduce(operator.or_, causes))


def phase_formats(
    policy: PrecisionPolicy, phases: Sequence[PrecisionPhase]
) -> list[ProductFormats]:
    """Return the formats of the policy, then those of each phase.

    Raises:
        ConfigError: If the policy has no narrow products or does not have these formats, or a phase
            changes nothing.
    """
    formats = [product_formats(policy)]
    for phase in phases:
        if not policy.is_narrow:
            raise ConfigError(
                PHASES,
                phase.given,
                f"the policy {policy.name} has no narrow products to change; use a narrow policy "
                "(fp8, fp8-rowwise, mxfp8, nvfp4), with bf16 in the phases that are wide",
            )
        found = _formats_of(phase, policy)
        if found == formats[-1]:
            raise ConfigError(
                PHASES,
                phase.given,
                f"changes nothing: the formats before it are {_words(found)} as well; products "
                "that a phase leaves out have the format of precision.policy",
            )
        formats.append(found)
    return formats


def build_schedule(
    layers: NarrowLayers | None, config: EngineConfig, policy: PrecisionPolicy, *, quiet: bool
) -> FormatSchedule | None:
    """Return the schedule of the formats of an engine; None under wide policies.

    Args:
        layers: The layers with narrow products; None under wide policies.
        config: The settings of the engine.
        policy: The resolved policy.
        quiet: Do not log changes; True on all ranks but rank 0.
    """
    if layers is None:
        return None
    schedule = FormatSchedule(
        layers, policy, config.precision_phases, config.precision_guard, quiet=quiet
    )
    if schedule.changes_formats and config.parallel and config.parallel.compile != "none":
        _allow_recompilation()
    return schedule


def describe_unreached(phases: Sequence[PrecisionPhase], formats: StepFormats | None) -> str | None:
    """Return which phases a run did not reach, as text; None if there are none.

    Args:
        phases: The phases of the run.
        formats: The formats of its last step; None without a step, or without changes.
    """
    if formats is None or formats.phase == len(phases):
        return None
    missed = [str(phase.given) for phase in phases[formats.phase :]]
    return f"{PHASES}: the run ended before {listed(missed)}"


def _allow_recompilation() -> None:
    """Let torch compile a block for each combination of the formats of its layers.

    By default, a block that needs a ninth version runs uncompiled, and rounds differently.
    """
    # Importing it takes a second, which only compiled models have to pay.
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)


def check_policy(
    policy: PrecisionPolicy, phases: Sequence[PrecisionPhase], guard: GuardConfig | None
) -> None:
    """Refuse phases and a guard that do not fit a policy.

    Args:
        policy: The policy.
        phases: The phases.
        guard: The guard; None for none.

    Raises:
        ConfigError: If the policy has no narrow products, or the phases do not fit its formats.
    """
    phase_formats(policy, phases)
    if guard is not None and guard.is_active and not policy.is_narrow:
        raise ConfigError(
            "precision.policy",
            policy.name,
            f"has no narrow products that {GUARD} could widen; use a narrow policy (fp8, "
            "fp8-rowwise, mxfp8, nvfp4), or remove the guard",
        )


def _formats_of(phase: PrecisionPhase, policy: PrecisionPolicy) -> ProductFormats:
    formats = product_formats(policy)
    for product in PRODUCTS:
        word = getattr(phase, product)
        if word == "bf16":
            formats = _wide(formats, [product])
        elif word is not None:
            try:  # the policy knows which formats fit its scales
                replace(
                    policy, forward_format=word, grad_format=word, wgrad_format=word, name="phase"
                )
            except ConfigError as error:
                problem = str(error).partition(": ")[2]
                raise ConfigError(f"{PHASES}.{product}", word, problem) from None
            formats = replace(formats, **{product: word})
    return formats


def _wide(formats: ProductFormats, products: Sequence[str]) -> ProductFormats:
    changed: dict[str, Any] = dict.fromkeys(products)
    return replace(formats, **changed) if changed else formats


def _widened(
    names: Sequence[str], wide_until: Sequence[Sequence[int]], step: int
) -> dict[str, tuple[str, ...]]:
    """Return the widened products of each layer with any."""
    found = {}
    for name, untils in zip(names, wide_until, strict=False):
        if max(untils) > step:
            pairs = zip(PRODUCTS, untils, strict=True)
            found[name] = tuple(product for product, until in pairs if until > step)
    return found


def _without(
    widened: Mapping[str, tuple[str, ...]], others: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    rest = {
        name: tuple(product for product in products if product not in others.get(name, ()))
        for name, products in widened.items()
    }
    return {name: products for name, products in rest.items() if products}


def _words(formats: ProductFormats) -> str:
    return ", ".join(f"{product}={getattr(formats, product) or 'bf16'}" for product in PRODUCTS)


def _described(widened: Mapping[str, tuple[str, ...]]) -> str:
    return listed([f"{name} ({', '.join(products)})" for name, products in widened.items()])
