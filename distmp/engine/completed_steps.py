"""Checks steps once they have completed, so that the host does not wait for the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

from distmp.engine.low_precision_matmuls import MatmulStatistics
from distmp.engine.outcome import WARN_AFTER_SKIPS, StepNumbers, StepOutcome, advice, describe_spike
from distmp.engine.parts import EngineParts
from distmp.errors import TrainingError, listed
from distmp.quantization.layers import LowPrecisionLayers

logger = logging.getLogger("distmp")

# Skips in a row with a finite loss that are normal while a dynamic loss scale finds its value.
NORMAL_SKIPS = 2


def _counts_calls(layers: LowPrecisionLayers, name: str) -> bool:
    """Return whether every call of a layer adds statistics.

    Backward skips the gradients of inputs and weights that need none, also in called layers.
    """
    formats = layers.formats
    return bool(formats.forward or (formats.wgrad and layers.modules[name].weight.requires_grad))


class SkipMessages:
    """Describes skipped steps, spikes and dropped microbatches.

    Skips and drops of steps in a row have one message.

    Args:
        scale_is_dynamic: Whether an overflow lowers the loss scale.
        explains: Whether `Engine.explain` can repeat a step.
    """

    def __init__(self, *, scale_is_dynamic: bool, explains: bool) -> None:
        self._scale_is_dynamic = scale_is_dynamic
        self._explains = explains
        # Updates before the skipped steps of the latest message: the same for all steps in a row.
        self._updates_before: int | None = None
        # The latest step with a dropped microbatch.
        self._dropped_in = -1

    def message(self, outcome: StepOutcome) -> str | None:
        """Return the message about a completed step; None without one, or after the first."""
        numbers = outcome.numbers
        step = numbers.applied_total + numbers.skipped_total
        if numbers.skipped:
            if numbers.applied_total == self._updates_before or self._is_normal(numbers):
                return None
            self._updates_before = numbers.applied_total
            in_a_row = numbers.skipped_in_a_row
            row = f" (the last of {in_a_row} in a row)" if in_a_row > 1 else ""
            return f"step {step} was skipped{row}: {self._reason(outcome)}"
        if numbers.spike:
            return f"step {step}: {describe_spike(numbers)}"
        if not numbers.dropped:
            return None
        continues, self._dropped_in = step - self._dropped_in in (0, 1), step
        return None if continues else f"step {step}: {self._dropped(numbers)}"

    def _is_normal(self, numbers: StepNumbers) -> bool:
        """Return whether a lower loss scale probably ends the skips."""
        finite = math.isfinite(numbers.loss) and math.isfinite(numbers.weight)
        may_be_scale = self._scale_is_dynamic and numbers.overflow and finite
        return may_be_scale and numbers.skipped_in_a_row <= NORMAL_SKIPS

    def _reason(self, outcome: StepOutcome) -> str:
        numbers = outcome.numbers
        if outcome.overflow_report is not None:
            return str(outcome.overflow_report)
        if not (numbers.overflow and math.isfinite(numbers.weight)):
            return advice(numbers)
        if numbers.dropped:
            return self._dropped(numbers)
        scale = f", loss scale {numbers.loss_scale:g}" if numbers.loss_scale != 1 else ""
        reason = f"a gradient of some rank is not finite (loss {numbers.loss:.4g}{scale})"
        hint = "; engine.explain(outcome) on every rank, before the next step, names the cause"
        return f"{reason}{hint}" if self._explains else reason

    def _dropped(self, numbers: StepNumbers) -> str:
        scale = "; in the first steps, the loss scale may be too high"
        return (
            f"microbatches dropped because of non-finite gradients (on_nonfinite): "
            f"{numbers.dropped}; check the data of these samples"
            f"{scale if self._scale_is_dynamic else ''}"
        )


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
        self._most_skips = parts.setup.config.max_consecutive_skips
        checks = parts.setup.config.first_step_checks
        self._modes = parts.modes if checks else None
        # Low-precision layers, until it is known which of them are called.
        self._layers = parts.setup.low_precision_matmuls.layers if checks else None
        self.forget()

    def forget(self) -> None:
        """Forget earlier steps: a load has replaced the state that they left."""
        self._previous: StepOutcome | None = None
        self._skips = SkipMessages(
            scale_is_dynamic=self._parts.state.loss_scale.floor is not None,
            explains=self._parts.setup.config.attribution,
        )

    def warnings(self, outcome: StepOutcome) -> Iterator[str]:
        """Yield warnings about the latest completed step; every rank has to call it.

        Args:
            outcome: Outcome of the step just taken.

        Raises:
            ConfigError: If ranks took the step with different settings.
            TrainingError: If too many steps in a row were skipped, and the caller does not check.
        """
        if self._modes is not None and (of_modes := self._modes.warning()):
            yield of_modes
        completed, self._previous = self._previous, outcome
        if self._parts.setup.host_waits:
            completed = outcome
        if completed is None:
            return
        self.check_ranks_agree(completed)
        yield from self._of_calls(completed.matmul_statistics)
        if self.is_checked:
            return
        if completed.read("spike") and not completed.read("skipped"):
            yield str(self._skips.message(completed))
        in_a_row = completed.read("skipped_in_a_row")
        if in_a_row >= self._most_skips:
            self.check_can_continue(completed)
        if in_a_row == WARN_AFTER_SKIPS:
            cause = self._explain(completed) or advice(completed.numbers)
            yield (
                f"{WARN_AFTER_SKIPS} steps in a row were skipped, so nothing is trained: {cause}; "
                f"engine.step raises an error after max_consecutive_skips = {self._most_skips}"
            )

    def check_can_continue(self, outcome: StepOutcome) -> None:
        """Raise if training cannot continue after a step; every rank has to call it.

        Raises:
            TrainingError: If the loss scale is at its lower limit, or too many steps in a row were
                skipped.
        """
        numbers, limit = outcome.numbers, self._most_skips
        if numbers.scale_exhausted:
            scale = f"{numbers.loss_scale:g}"
            problem = f"min_scale = {scale}: overflow at the lowest loss scale that is allowed"
        elif numbers.skipped_in_a_row >= limit:
            reason = "were skipped as spikes" if numbers.spike else "had no finite update"
            problem = f"max_consecutive_skips = {limit}: that many steps in a row {reason}"
        else:
            return
        raise TrainingError(f"{problem}; {self._explain(outcome) or advice(numbers)}")

    def _of_calls(self, statistics: MatmulStatistics | None) -> Iterator[str]:
        """Warn once about low-precision layers that no rank called in the first step."""
        if self._layers is None or statistics is None:
            return
        elements = statistics.read()[..., -1].sum(1).tolist()
        if not any(elements):  # all matmuls have full precision in this step
            return
        layers, self._layers = self._layers, None
        names = [
            repr(name)
            for name, count in zip(statistics.layers, elements, strict=True)
            if count == 0 and _counts_calls(layers, name)
        ]
        if names:
            yield (
                f"no rank called the linear layers {listed(names)} in the first step; if the model "
                "uses their weights without calling them, their products have the compute dtype, "
                "and not the formats of the policy: call the layers, or list them in "
                "precision.policy.hp"
            )

    def log_skip(self, outcome: StepOutcome) -> None:
        """Log on rank 0 a skipped step, a spike or dropped microbatches; waits for the step."""
        message = self._skips.message(outcome)
        if message is not None and self._parts.setup.world.rank == 0:
            logger.warning(message)

    def check_ranks_agree(self, outcome: StepOutcome) -> None:
        """Raise if ranks took a step with different settings; every rank has to call it."""
        if outcome.ranks_differ:
            self._previous = None  # reported
            self._parts.raise_difference()
