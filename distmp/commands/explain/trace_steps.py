"""Trace memory, collectives and dtypes of a few steps of a configuration's engine."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.commands.explain.comm_volume import Collective, CollectiveRecorder
from distmp.commands.explain.observe import DtypeRecorder, ObservedDtypes
from distmp.config import RunConfig
from distmp.distributed.world import World
from distmp.engine import Engine
from distmp.precision import PrecisionPolicy
from distmp.quantization import NarrowLayers
from distmp.training.setup import Progress, RunComponents, build_engine, training_batches
from distmp.utils import live_bytes as memory_parts
from distmp.utils.live_bytes import LiveBytes

# Number of steps for which an engine keeps microbatches for attribution.
STEPS_KEPT = 2


class StepTrace(NamedTuple):
    """The trace of the last step.

    Attributes:
        strategy_reason: What the strategy selected and why.
        peak: Memory at the peak, in bytes by part, see `distmp.utils.live_bytes`.
        start_peak: Memory at the peak while the engine was built, in bytes.
        collectives: The collectives of the step, in order.
        observed: The dtypes of all steps.
        narrow_layers: Which linear layers have narrow products, and why others do not; empty under
            policies without any.
    """

    strategy_reason: str
    peak: dict[str, int]
    start_peak: int
    collectives: list[Collective]
    observed: ObservedDtypes
    narrow_layers: str


def trace_steps(
    config: RunConfig,
    parts: RunComponents,
    world: World,
    policy: PrecisionPolicy,
    *,
    steps: int = 2,
    microbatches: int | None = None,
    initialize: bool = False,
) -> StepTrace:
    """Build the engine of a configuration as a run does, and trace its steps.

    Args:
        config: The configuration of the run.
        parts: Data, model and loss of the run, see `distmp.training.setup.prepare`.
        world: The process group; all its ranks must call this function, unless they are simulated.
        policy: The resolved policy.
        steps: Number of steps; optimizer state exists from the second step on.
        microbatches: Number of microbatches to run per step; None runs all.
        initialize: Whether to compute the initial values of a deferred model, which takes no more
            memory than filling it with NaN.

    Raises:
        ConfigError: If the run itself would raise it.
    """
    with LiveBytes() as memory, CollectiveRecorder() as recorder:
        tracker = _PhaseTracker(memory, recorder, parts.loss)
        engine = build_engine(
            config.with_fixed_formats(),
            parts._replace(loss=tracker.loss),
            world,
            policy=policy,
            attribution=config.precision.attribution,
            first_step_checks=False,
            load=not initialize,
        )
        start_peak = sum(memory.peak.values())
        average = _average(engine) if config.ema.decay > 0 else []
        memory.label(average, memory_parts.AVERAGE)
        tracker.engine = engine
        narrow = engine.narrow_products.layers
        dtypes = DtypeRecorder(engine.model, narrow)
        tracker.accumulated = dtypes.observed.accumulated
        engine.optimizer.register_step_pre_hook(tracker.before_update)
        engine.optimizer.register_step_post_hook(tracker.after_update)
        with closing(training_batches(config, parts, world, Progress())) as batches:
            for _ in range(steps):
                memory.phase = memory_parts.BATCHES
                batch = next(batches)[:microbatches]
                tracker.label()
                memory.phase = memory_parts.REST
                memory.start()
                recorder.start()
                tracker.microbatch = 0
                with dtypes:
                    engine.step(batch)
    peak = dict(memory.peak)
    if microbatches is not None:
        # Memory also holds the microbatches that were not run, and those of earlier steps.
        kept_steps = 1 + (STEPS_KEPT if config.precision.attribution else 0)
        microbatch_bytes = _size(batch) / len(batch)
        peak[memory_parts.BATCHES] = round(microbatch_bytes * kept_steps * parts.microbatches)
    return StepTrace(
        engine.strategy_reason,
        peak,
        start_peak,
        recorder.collectives,
        dtypes.observed,
        "" if narrow is None else _described(narrow, config),
    )


def _described(layers: NarrowLayers, config: RunConfig) -> str:
    if not config.precision.phases:
        return layers.describe()
    return f"{layers.describe()}; the formats are those after the last of precision.phases"


def _average(engine: Engine) -> list[Tensor]:
    """Return tensors of the size of a `WeightAverage`, which fake tensors cannot build."""
    stepped = engine.tensors_by_use()[memory_parts.MASTERS]
    return [torch.empty_like(tensor, dtype=torch.float32) for tensor in stepped]


class _PhaseTracker:
    """Updates the phase of the memory tracker and of the recorder during a step."""

    def __init__(self, memory: LiveBytes, recorder: CollectiveRecorder, loss: Any) -> None:
        self.engine: Engine | None = None
        self.microbatch = 0
        # Dtypes of the buffers in which gradients are summed.
        self.accumulated: set[torch.dtype] = set()
        self._memory = memory
        self._recorder = recorder
        self._loss = loss

    def loss(self, module: nn.Module, batch: Any) -> Any:
        """Compute the loss: tensors of forward are activations, backward follows."""
        self._recorder.microbatch = self.microbatch
        self.microbatch += 1
        # Between microbatches, because FSDP rounds the sums to the dtype of the weights.
        self.accumulated.update(tensor.dtype for tensor in self._label_gradients())
        self._memory.phase = memory_parts.ACTIVATIONS
        try:
            return self._loss(module, batch)
        finally:
            self._memory.phase = memory_parts.BACKWARD

    def before_update(self, *_: Any) -> None:
        """Enter the phase of the optimizer's step."""
        self._label_gradients()
        self._memory.phase = memory_parts.OPTIMIZER

    def after_update(self, *_: Any) -> None:
        """Leave the phase of the optimizer's step."""
        self._recorder.updated = True
        self._memory.phase = memory_parts.REST

    def label(self) -> None:
        """Label the tensors that persist between steps."""
        assert self.engine is not None
        for use, tensors in self.engine.tensors_by_use().items():
            self._memory.label(tensors, use)

    def _label_gradients(self) -> list[Tensor]:
        assert self.engine is not None
        tensors = self.engine.tensors_by_use()
        for use in (memory_parts.PARTIAL_SUMS, memory_parts.GRADIENTS):
            self._memory.label(tensors[use], use)
        return tensors[memory_parts.GRADIENTS]


def _size(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
