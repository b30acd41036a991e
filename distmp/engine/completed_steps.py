"""Checks steps once they have completed, so that the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from distmp.engine.narrow_checks import CallCheck
from distmp.engine.observers import EvaluationMode
from distmp.engine.outcome import WARN_AFTER_SKIPS, StepOutcome, advice
from distmp.engine.setup import Setup
from distmp.engine.step_settings import StepSettings


class CompletedSteps:
    """Checks the latest completed step: on a device that is the step before the one just taken.

    Args:
        setup: The model, its strategy and its optimizer.
        settings: What all ranks must have in common.
        modes: Which parts of the model are in evaluation mode.
        explain: Returns the cause of an overflow, see `Engine.explain`.

    Attributes:
        is_checked: Whether the caller checks outcomes, so that skipped steps need no warning.
    """

    def __init__(
        self,
        setup: Setup,
        settings: StepSettings,
        modes: EvaluationMode,
        explain: Callable[[StepOutcome], object],
    ) -> None:
        self.is_checked = False
        self._setup = setup
        self._settings = settings
        self._explain = explain
        checks = setup.config.first_step_checks
        self._modes = modes if checks else None
        self._call_check = CallCheck(setup.narrow_products.layers if checks else None)
        self._previous: StepOutcome | None = None

    def warnings(self, outcome: StepOutcome) -> Iterator[str]:
        """Yield warnings about the latest completed step; every rank has to call it.

        Args:
            outcome: That of the step just taken.

        Raises:
            ConfigError: If ranks took the step with different settings.
        """
        if self._modes is not None and (of_modes := self._modes.warning()):
            yield of_modes
        completed, self._previous = self._previous, outcome
        if self._setup.host_waits:
            completed = outcome
        if completed is None:
            return
        self.check_ranks_agree(completed)
        if warning := self._call_check.warning(completed.narrow_statistics):
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
            self._settings.raise_difference()
