"""Checks steps once they have completed, so that the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from distmp.engine.low_precision_matmuls import MatmulStatistics
from distmp.engine.outcome import WARN_AFTER_SKIPS, StepOutcome, advice
from distmp.engine.parts import EngineParts
from distmp.errors import listed
from distmp.quantization import LowPrecisionLayers


class CallCheck:
    """Warns once about low-precision layers that no rank called in the first step.

    Args:
        layers: The layers with low-precision matmuls; None: there are none.
    """

    def __init__(self, layers: LowPrecisionLayers | None) -> None:
        self._layers = layers

    def warning(self, statistics: MatmulStatistics | None) -> str | None:
        """Return the warning about a completed step; None without one, or after the first check.

        Args:
            statistics: Statistics of the step, over all ranks.
        """
        if self._layers is None or statistics is None:
            return None
        elements = statistics.read()[..., -1].sum(1).tolist()
        if not any(elements):  # all matmuls have full precision in this step
            return None
        layers, self._layers = self._layers, None
        names = [
            repr(name)
            for name, count in zip(statistics.layers, elements, strict=True)
            if count == 0 and _counts_calls(layers, name)
        ]
        if not names:
            return None
        return (
            f"no rank called the linear layers {listed(names)} in the first step; if the model "
            "uses their weights without calling them, their products have the compute dtype, and "
            "not the formats of the policy: call the layers, or list them in precision.policy.hp"
        )


def _counts_calls(layers: LowPrecisionLayers, name: str) -> bool:
    """Return whether every call of a layer adds statistics.

    Backward skips the gradients of inputs and weights that need none, also in called layers.
    """
    formats = layers.states[name].formats
    return bool(formats.forward or (formats.wgrad and layers.modules[name].weight.requires_grad))


class CompletedSteps:
    """Checks the latest completed step; unless the host waits, the one before the latest.

    Args:
        parts: The parts of the engine.
        explain: Returns the cause of an overflow, see `Engine.explain`.

    Attributes:
        is_checked: Whether the caller checks outcomes, so that skipped steps need no warning.
    """

    def __init__(self, parts: EngineParts, explain: Callable[[StepOutcome], object]) -> None:
        self.is_checked = False
        self._parts = parts
        self._explain = explain
        checks = parts.setup.config.first_step_checks
        self._modes = parts.modes if checks else None
        self._call_check = CallCheck(parts.setup.low_precision_matmuls.layers if checks else None)
        self._previous: StepOutcome | None = None

    def warnings(self, outcome: StepOutcome) -> Iterator[str]:
        """Yield warnings about the latest completed step; every rank has to call it.

        Args:
            outcome: Outcome of the step just taken.

        Raises:
            ConfigError: If ranks took the step with different settings.
        """
        if self._modes is not None and (of_modes := self._modes.warning()):
            yield of_modes
        completed, self._previous = self._previous, outcome
        if self._parts.setup.host_waits:
            completed = outcome
        if completed is None:
            return
        self.check_ranks_agree(completed)
        if warning := self._call_check.warning(completed.matmul_statistics):
            yield warning
        if not self.is_checked and completed.read("skipped_in_a_row") == WARN_AFTER_SKIPS:
            cause = self._explain(completed) or advice(completed.numbers)
            yield (
                f"{WARN_AFTER_SKIPS} steps in a row were skipped, so nothing is trained: {cause}; "
                "call engine.check(outcome) after each step to end training if this continues"
            )

    def check_ranks_agree(self, outcome: StepOutcome) -> None:
        """Raise if ranks took a step with different settings; every rank has to call it."""
        if outcome.ranks_differ:
            self._previous = None  # reported
            self._parts.raise_difference()
