"""Changes the formats of matmuls between steps, as configured in `precision.phases`."""

# Note [When policies change]
#
# The host chooses the formats of a step when it launches the step, and must not wait for the device
# then. The number of tokens is on the device. The host reads that of step t after it has launched
# step t + 1, when step t has usually ended, and uses it from step t + 2 on. This delay is fixed: a
# CPU, which never waits, has it too, so that devices and ranks change formats at the same step.
#
# A state after step t + 1 holds the numbers after steps t and t + 1, so that a run that resumes
# continues with the same formats.

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from distmp.engine.settings import PHASES, PrecisionPhase
from distmp.errors import ConfigError, require
from distmp.precision.notation import policy as policy_of
from distmp.precision.policy import PrecisionPolicy
from distmp.quantization.layers import LowPrecisionLayers, product_formats
from distmp.quantization.linear import ProductFormats
from distmp.scaling.step_decision import StepDecision
from distmp.utils.host_copy import HostCopy

logger = logging.getLogger("distmp")


class PhaseSchedule:
    """Counts tokens and sets the formats of each step.

    Args:
        layers: The layers with low-precision matmuls.
        policy: The policy after the last phase.
        phases: The phases.
        quiet: Do not log changes; True on all ranks but rank 0.

    Attributes:
        tokens: Tokens of all steps but the last one, and of all steps: FP64 [2].
    """

    def __init__(
        self,
        layers: LowPrecisionLayers,
        policy: PrecisionPolicy,
        phases: Sequence[PrecisionPhase],
        *,
        quiet: bool,
    ) -> None:
        self._layers = layers
        self._phases = phases
        self._names = [*(phase.policy for phase in phases), policy.name]
        self._formats = [*phase_formats(policy, phases), product_formats(policy)]
        self.tokens = torch.zeros(2, dtype=torch.float64, device=layers.counts.device)
        self._quiet = quiet
        # Phase of the last step; -1 before the first one.
        self._last = -1
        self._copy: HostCopy
        self.continue_from_state()

    def begin_step(self, step: int) -> str:
        """Return the policy whose formats a step has, and log a change.

        Args:
            step: Number of steps before this one.
        """
        if self._phase != self._last and not self._quiet:
            message = "%s: policy %s from step %d on"
            logger.warning(message, PHASES, self._names[self._phase], step + 1)
        self._last = self._phase
        return self._names[self._phase]

    def end_step(self, decision: StepDecision) -> None:
        """Count the tokens of a step, and set the formats of the next one."""
        self.tokens[0] = self.tokens[1]
        self.tokens[1] += decision.weight.nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
        before, self._copy = self._copy, HostCopy(self.tokens[1:].clone())
        self._set_formats(before.read()[0])

    def continue_from_state(self) -> None:
        """Set the formats of the next step, from the live state."""
        # The number of tokens after the last step.
        self._copy = HostCopy(self.tokens[1:].clone())
        self._set_formats(self.tokens[0].item())

    def _set_formats(self, tokens: float) -> None:
        self._phase = sum(phase.until_tokens <= tokens for phase in self._phases)
        self._layers.set_formats(self._formats[self._phase])


def phase_formats(
    policy: PrecisionPolicy, phases: Sequence[PrecisionPhase]
) -> list[ProductFormats]:
    """Return the formats of each phase.

    Args:
        policy: The policy after the last phase.
        phases: The phases.

    Raises:
        ConfigError: If a policy differs in more than the formats of matmuls.
    """
    if phases and not policy.has_low_precision_matmuls:
        problem = (
            f"{policy.name}, the policy of the run, has no low-precision matmuls to change; use "
            "fp8, fp8-rowwise, mxfp8 or nvfp4, and bf16 in a phase (with until_tokens: .inf, it "
            "does not end)"
        )
        raise ConfigError(PHASES, phases[0].policy, problem)
    return [_formats_of(phase, policy) for phase in phases]


def _formats_of(phase: PrecisionPhase, policy: PrecisionPolicy) -> ProductFormats:
    try:
        found = policy_of(phase.policy)
    except ConfigError as error:
        problem = str(error).partition(": ")[2]
        raise ConfigError(f"{PHASES}.policy", phase.policy, problem) from None
    is_same = replace(found.high_precision, name=policy.name) == policy.high_precision
    if found.has_low_precision_matmuls:
        is_same &= (found.scaling, found.hp) == (policy.scaling, policy.hp)
    problem = (
        f"differs from {policy.name}, the policy of the run, in more than forward, grad and "
        f"wgrad; use a text such as '{policy.name},forward=bf16', or bf16 with the other keys "
        "of the policy"
    )
    require(is_same, f"{PHASES}.policy", phase.policy, problem)
    return replace(product_formats(found), scaling=policy.scaling)
