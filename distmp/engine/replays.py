"""Keeps the inputs of the latest steps, and repeats a step that overflowed to find the cause."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from distmp.diagnosis.attribution import OverflowContext, OverflowReport, diagnose
from distmp.diagnosis.replay import StepInputs, StepReplay
from distmp.engine.outcome import MicrobatchStats, StepNumbers, StepOutcome
from distmp.engine.parts import EngineParts
from distmp.engine.step import backward, forward
from distmp.precision.keep import product_switches

# Steps whose microbatches are kept. The outcome of a step is usually read after the next step was
# started.
STEPS_KEPT = 2


@dataclass(frozen=True)
class Replays:
    """Explains the overflow of one of the latest steps.

    Attributes:
        parts: The parts of the engine.
        recent: Outcome and inputs of the latest steps.
    """

    parts: EngineParts
    recent: deque[tuple[StepOutcome, StepInputs]] = field(
        default_factory=lambda: deque(maxlen=STEPS_KEPT)
    )

    def keep(
        self, outcome: StepOutcome, microbatches: Sequence[Any], stats: MicrobatchStats
    ) -> None:
        """Keep references to the inputs of a step, with `attribution`."""
        setup, state = self.parts.setup, self.parts.state
        if not setup.config.attribution:
            return
        inputs = StepInputs(
            tuple(microbatches),
            stats.streams,
            stats.losses,
            stats.weights,
            position=(state.steps - 1, setup.world.rank * len(microbatches)),
            formats=setup.low_precision_matmuls.product_formats,
        )
        self.recent.append((outcome, inputs))

    def explain(self, outcome: StepOutcome) -> OverflowReport | None:
        """Return the cause of an overflow, see `Engine.explain`; every rank has to call it."""
        if outcome.overflow_report is None and outcome.numbers.overflow:
            for recent, inputs in self.recent:
                if recent is outcome:
                    with self.parts.calls.call("explain"):
                        outcome.overflow_report = self._replay(outcome.numbers, inputs)
        return outcome.overflow_report

    def _replay(self, numbers: StepNumbers, inputs: StepInputs) -> OverflowReport:
        setup, state = self.parts.setup, self.parts.state
        context = OverflowContext(
            scale=numbers.loss_scale,
            weight=numbers.weight,
            floor=state.loss_scale.floor,
            compute_dtype=setup.policy.compute_dtype,
            reduce_dtype=setup.policy.reduce_dtype,
            has_masters=setup.policy.has_masters,
            has_updates=numbers.applied_total > 0,
            exact=int(state.counts[0]) == numbers.applied_total,
        )
        replay = StepReplay(setup.strategy, self._microbatch, inputs, setup.world.rank)
        evidence = replay.evidence(context.scale, context.lowest, context.compute_dtype)
        return diagnose(setup.world.ranks.gather(evidence), context)

    def _microbatch(self, batch: Any, scale: Tensor) -> Tensor:
        setup, state = self.parts.setup, self.parts.state
        with product_switches(setup.policy):
            loss, _ = forward(setup, batch)
            backward(setup.strategy, loss, scale / (state.nominal_weight or 1.0))
        return loss.detach().clone()
