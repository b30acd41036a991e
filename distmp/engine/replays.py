"""Keeps the inputs of the latest steps, and repeats a step that overflowed to find the cause."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distmp.diagnosis.attribution import OverflowContext, OverflowReport, diagnose
from distmp.diagnosis.replay import StepInputs, StepReplay
from distmp.engine.calls import EngineCalls
from distmp.engine.microbatches import MicrobatchStats
from distmp.engine.outcome import StepNumbers, StepOutcome
from distmp.engine.setup import Setup
from distmp.engine.state import EngineState
from distmp.engine.step import backward, forward
from distmp.precision.switches import product_switches

# Steps whose microbatches are kept. The outcome of a step is usually read after the next step was
# started.
STEPS_KEPT = 2


class Replays:
    """Explains the overflow of one of the latest steps.

    Args:
        setup: The model, its strategy and its optimizer.
        state: The numbers of the engine.
        calls: The calls that the ranks make together.
    """

    def __init__(self, setup: Setup, state: EngineState, calls: EngineCalls) -> None:
        self._setup = setup
        self._state = state
        self._calls = calls
        self._recent: deque[tuple[StepOutcome, StepInputs]] = deque(maxlen=STEPS_KEPT)

    def keep(
        self, outcome: StepOutcome, microbatches: Sequence[Any], stats: MicrobatchStats
    ) -> None:
        """Keep references to the inputs of a step, with `attribution`."""
        if not self._setup.config.attribution:
            return
        products = self._setup.narrow_products
        inputs = StepInputs(
            tuple(microbatches),
            stats.streams,
            stats.losses,
            stats.weights,
            position=(products.step - 1, self._setup.world.rank * len(microbatches)),
            formats=products.layer_formats,
        )
        self._recent.append((outcome, inputs))

    def explain(self, outcome: StepOutcome) -> OverflowReport | None:
        """Return the cause of an overflow, see `Engine.explain`; every rank has to call it."""
        if outcome.overflow_report is None and outcome.numbers.overflow:
            for recent, inputs in self._recent:
                if recent is outcome:
                    with self._calls.call("explain"):
                        outcome.overflow_report = self._replay(outcome.numbers, inputs)
        return outcome.overflow_report

    def _replay(self, numbers: StepNumbers, inputs: StepInputs) -> OverflowReport:
        world, policy = self._setup.world, self._setup.policy
        context = OverflowContext(
            scale=numbers.loss_scale,
            weight=numbers.weight,
            floor=self._state.loss_scale.floor,
            compute_dtype=policy.compute_dtype,
            has_masters=policy.has_masters,
            exact=int(self._state.counts[0]) == numbers.applied_total,
        )
        replay = StepReplay(self._setup.strategy, self._microbatch, inputs, world.rank)
        evidence = replay.evidence(context.scale, context.lowest, context.compute_dtype)
        return diagnose(world.ranks.gather(evidence), context)

    def _microbatch(self, batch: Any, scale: Tensor) -> Tensor:
        with product_switches(self._setup.policy):
            loss, _ = forward(self._setup, batch)
            backward(self._setup.strategy, loss, scale / (self._state.nominal_weight or 1.0))
        return loss.detach().clone()
