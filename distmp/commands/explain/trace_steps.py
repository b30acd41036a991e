"""Trace memory, collectives and dtypes of a few steps of a configuration's engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.commands.explain.observe import DtypeRecorder, ModuleGroup, ObservedDtypes
from distmp.config import RunConfig
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.engine.replays import STEPS_KEPT
from distmp.precision import PrecisionPolicy
from distmp.quantization.layers import LowPrecisionLayers
from distmp.training.components import ModelAndData, Progress, build_engine, training_batches
from distmp.utils import live_bytes as memory_parts
from distmp.utils.live_bytes import LiveBytes
from distmp.utils.tensor_trees import tensors_in

# Name of the c10d operation: name of the collective, and its cost factor. With a ring algorithm on
# n ranks, a rank sends factor * (n - 1) / n bytes for each byte of the full tensor.
KINDS = {
    "allreduce_": ("all-reduce", 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "_allgather_base_": ("all-gather", 1),
    "allgather_": ("all-gather", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 1),
}


class Collective(NamedTuple):
    """One collective.

    Attributes:
        kind: Name of the collective, such as "all-reduce".
        dtype: Communication dtype.
        elements: Number of elements of the full tensor; with unequal parts, that of a tensor of
            equal parts of which rank 0 sends as many.
        ranks: The ranks of the group. Rank 0, whose bytes are counted, is one of them.
        microbatch: Microbatch of the step in which it was started, from 0; -1 before the first.
        updated: Whether it was started after the optimizer's step; None: during it.
    """

    kind: str
    dtype: torch.dtype
    elements: float
    ranks: Sequence[int]
    microbatch: int
    updated: bool | None

    @property
    def nbytes(self) -> float:
        """Number of bytes that a rank sends."""
        factor = next(factor for kind, factor in KINDS.values() if kind == self.kind)
        ranks = len(self.ranks)
        return factor * (ranks - 1) / ranks * self.elements * self.dtype.itemsize

    def bytes_between_machines(self, ranks_per_machine: int) -> float:
        """Return how many of `nbytes` leave the machine, averaged over its ranks in the group."""
        here = sum(rank < ranks_per_machine for rank in self.ranks)
        elsewhere = len(self.ranks) - here
        if elsewhere == 0:
            return 0.0
        if self.kind == "all-to-all":
            return self.nbytes * elsewhere / (len(self.ranks) - 1)
        return self.nbytes / here


class CollectiveRecorder(TorchDispatchMode):
    """Records the collectives that are started inside of it.

    Attributes:
        collectives: The recorded collectives, in order.
        microbatch: The current microbatch of the step, set by the caller.
        updated: Whether the optimizer has run, set by the caller; None while it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if collective := started(func, args):
            self.collectives.append(
                collective._replace(microbatch=self.microbatch, updated=self.updated)
            )
        return func(*args, **(kwargs or {}))

    def start(self) -> None:
        """Start recording a new step."""
        self.collectives: list[Collective] = []
        self.microbatch = -1
        self.updated: bool | None = False


def started(func: Any, args: Any) -> Collective | None:
    """Return the collective that an operation starts; None if it starts none."""
    name = func.overloadpacket.__name__
    if func.namespace != "c10d" or name not in KINDS:
        return None
    tensors = tensors_in(args)
    ranks = group_ranks(args)
    # Base operations take (output, input), list operations (outputs, inputs): the larger side is
    # the full tensor.
    if name == "alltoall_base_" and (sizes := args[4]):  # unequal parts, of which one stays here
        elements = sum(sizes[1:]) * len(ranks) / max(1, len(ranks) - 1)
    elif "_base_" in name:
        elements = max(tensor.numel() for tensor in tensors)
    else:
        elements = sum(tensor.numel() for tensor in tensors_in(args[0]))
    return Collective(KINDS[name][0], tensors[0].dtype, elements, ranks, 0, False)


@dataclass(frozen=True)
class CommVolume:
    """The collectives of one kind in a step.

    Attributes:
        purpose: What is communicated, such as "gradients".
        kind: Name of the collective.
        dtype: Communication dtype.
        calls: Number of calls in a step.
        nbytes: Number of bytes that a rank sends in a step.
        between_machines: How many of them leave the machine: the bytes that each network card sends
            if a machine has one for each rank.
    """

    purpose: str
    kind: str
    dtype: torch.dtype
    calls: int
    nbytes: int
    between_machines: int


def comm_volumes(
    collectives: Iterable[Collective],
    microbatches: int,
    run: int,
    ranks_per_machine: int,
    *,
    shards: bool,
) -> list[CommVolume]:
    """Extrapolate the volume of a step with `microbatches` from a step with fewer of them.

    Args:
        collectives: The collectives of a step with `run` microbatches; the second one also
            represents those that were not run.
        microbatches: Number of microbatches per step.
        run: Number of microbatches that were run, all or three and more.
        ranks_per_machine: Number of ranks on each machine.
        shards: Whether the strategy shards parameters, and therefore gathers them.
    """
    totals: dict[tuple[str, str, torch.dtype], tuple[int, float, float]] = {}
    for collective in collectives:
        if len(collective.ranks) == 1:
            continue
        times = microbatches - run + 1 if collective.microbatch == 1 else 1
        key = (_purpose(collective, shards=shards), collective.kind, collective.dtype)
        calls, sent, left = totals.get(key, (0, 0.0, 0.0))
        totals[key] = (
            calls + times,
            sent + times * collective.nbytes,
            left + times * collective.bytes_between_machines(ranks_per_machine),
        )
    return [
        CommVolume(*key, calls, round(sent), round(left))
        for key, (calls, sent, left) in totals.items()
    ]


def _purpose(collective: Collective, *, shards: bool) -> str:
    if collective.kind == "broadcast":
        return "module buffers"
    if collective.kind == "all-gather" and (shards or collective.updated):
        return "parameters"  # FSDP2 gathers different dtypes as bytes
    if collective.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "decision" if collective.dtype == torch.float64 else "agreement"
    if collective.updated is None:
        return "optimizer"
    return "gradients"


def group_ranks(args: Any) -> Sequence[int]:
    """Return the ranks of the group of a c10d operation, from its arguments."""
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf))
    return range(dist.get_world_size())


class StepTrace(NamedTuple):
    """The trace of the last step.

    Attributes:
        strategy_reason: What the strategy selected and why.
        peak: Memory at the peak, in bytes by part, see `distmp.utils.live_bytes`.
        start_peak: Memory at the peak while the engine was built, in bytes.
        collectives: The collectives of the step, in order.
        observed: The dtypes of all steps.
        low_precision_layers: Which linear layers have low-precision matmuls, and why others do
            not; empty under policies without any.
    """

    strategy_reason: str
    peak: dict[str, int]
    start_peak: int
    collectives: list[Collective]
    observed: ObservedDtypes
    low_precision_layers: str


def trace_steps(
    config: RunConfig,
    parts: ModelAndData,
    world: World,
    policy: PrecisionPolicy,
    *,
    groups: Sequence[ModuleGroup] = (),
    steps: int = 2,
    microbatches: int | None = None,
) -> StepTrace:
    """Build the engine of a configuration as a run does, and trace its steps.

    Args:
        config: The configuration of the run.
        parts: Data, model and loss of the run.
        world: The process group; all its ranks must call this function, unless they are simulated.
        policy: The resolved policy.
        groups: The groups of modules by which dtypes are recorded.
        steps: Number of steps; optimizer state exists from the second step on.
        microbatches: Number of microbatches to run per step; None runs all.

    Raises:
        ConfigError: If the run itself would raise it.
    """
    with LiveBytes() as memory, CollectiveRecorder() as recorder:
        engine = build_engine(
            config.with_fixed_formats(),
            parts._replace(loss=lambda module, batch: tracker.loss(module, batch)),  # built below
            world,
            policy=policy,
            first_step_checks=False,
        )
        start_peak = sum(memory.peak.values())
        average = _average(engine) if config.ema.decay > 0 else []
        memory.label(average, memory_parts.AVERAGE)
        low_precision = engine.low_precision_matmuls.layers
        dtypes = DtypeRecorder(engine.model, low_precision, groups)
        tracker = _PhaseTracker(engine, memory, recorder, dtypes, parts.loss)
        engine.optimizer.register_step_pre_hook(tracker.before_update)
        engine.optimizer.register_step_post_hook(tracker.after_update)
        alone = replace(config, data=replace(config.data, workers=0))
        reader = replace(world, group=None)  # does not compare samples, which may be fake
        with closing(training_batches(alone, parts, reader, Progress())) as batches:
            for _ in range(steps):
                memory.phase = memory_parts.BATCHES
                batch = next(batches).microbatches[:microbatches]
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
        kept_steps = 1 + STEPS_KEPT
        microbatch_bytes = sum(tensor.nbytes for tensor in tensors_in(batch)) / len(batch)
        peak[memory_parts.BATCHES] = round(microbatch_bytes * kept_steps * parts.microbatches)
    return StepTrace(
        engine.strategy_reason,
        peak,
        start_peak,
        recorder.collectives,
        dtypes.observed,
        "" if low_precision is None else _described(low_precision, config),
    )


def _described(layers: LowPrecisionLayers, config: RunConfig) -> str:
    if not config.precision.phases:
        return layers.describe()
    return f"{layers.describe()}; the formats are those after the last of precision.phases"


def _average(engine: Engine) -> list[Tensor]:
    """Return tensors of the size of a `WeightAverage`, which fake tensors cannot build."""
    updated = engine.tensors_by_use()[memory_parts.MASTERS]
    return [torch.empty_like(tensor, dtype=torch.float32) for tensor in updated]


@dataclass(eq=False)
class _PhaseTracker:
    """Updates the phase of the memory tracker and of the recorders during a step."""

    engine: Engine
    memory: LiveBytes
    recorder: CollectiveRecorder
    dtypes: DtypeRecorder
    loss_of_run: Any
    microbatch: int = 0

    def loss(self, module: nn.Module, batch: Any) -> Any:
        """Compute the loss: tensors of forward are activations, backward follows."""
        self.recorder.microbatch = self.microbatch
        self.microbatch += 1
        # Between microbatches, because FSDP rounds the sums to the dtype of the weights.
        sums = self._label_gradients()
        self.dtypes.observed.accumulated.update(tensor.dtype for tensor in sums)
        self.memory.phase = memory_parts.ACTIVATIONS
        try:
            return self.loss_of_run(module, batch)
        finally:
            self.memory.phase = memory_parts.BACKWARD

    def before_update(self, *_: Any) -> None:
        """Enter the phase of the optimizer's step."""
        self._label_gradients()
        self.memory.phase = memory_parts.OPTIMIZER
        self.recorder.updated, self.dtypes.is_paused = None, True

    def after_update(self, *_: Any) -> None:
        """Leave the phase of the optimizer's step."""
        self.recorder.updated, self.dtypes.is_paused = True, False
        self.memory.phase = memory_parts.REST

    def label(self) -> None:
        """Label the tensors that persist between steps."""
        for use, tensors in self.engine.tensors_by_use().items():
            self.memory.label(tensors, use)

    def _label_gradients(self) -> list[Tensor]:
        tensors = self.engine.tensors_by_use()
        for use in (memory_parts.PARTIAL_SUMS, memory_parts.GRADIENTS):
            self.memory.label(tensors[use], use)
        return tensors[memory_parts.GRADIENTS]
