"""A few steps of the engine of a configuration, with memory and collectives under observation."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.commands.explain import memory as parts_of_memory
from distmp.commands.explain.comm_volume import Sent, Wire
from distmp.commands.explain.memory import LiveBytes
from distmp.config import RunConfig
from distmp.distributed.world import World
from distmp.engine import Engine
from distmp.precision import PrecisionPolicy
from distmp.training.setup import Progress, RunComponents, build_engine, training_batches

# How many steps ago the oldest microbatches are that an engine keeps for attribution.
STEPS_KEPT = 2


class Followed(NamedTuple):
    """What was seen in the last of the steps.

    Attributes:
        strategy_reason: What the strategy chose and why.
        peak: Bytes by part when they were most, see `distmp.commands.explain.memory`.
        sent: The collectives.
    """

    strategy_reason: str
    peak: dict[str, int]
    sent: list[Sent]


def follow(
    config: RunConfig,
    parts: RunComponents,
    world: World,
    policy: PrecisionPolicy,
    *,
    steps: int = 2,
    microbatches: int | None = None,
) -> Followed:
    """Build the engine of a configuration as a run does, and take steps.

    Args:
        config: The run.
        parts: What it is made of, see `distmp.training.setup.prepare`.
        world: The ranks, which all have to call it, or which are fake_ranks.
        policy: Its policy, resolved.
        steps: How many; optimizer state and what ranks agree on once is there from the second on.
        microbatches: Take only the first of each step; None takes all.

    Raises:
        ConfigError: As a run raises it.
    """
    with LiveBytes() as memory, Wire() as wire:
        watch = _Watch(memory, wire, parts.loss)
        engine = build_engine(
            config,
            parts._replace(loss=watch.loss),
            world,
            policy=policy,
            attribution=config.precision.attribution,
            first_step_checks=False,
        )
        watch.engine = engine
        engine.optimizer.register_step_pre_hook(watch.before_update)
        engine.optimizer.register_step_post_hook(watch.after_update)
        with closing(training_batches(config, parts, world, Progress())) as batches:
            for _ in range(steps):
                memory.phase = parts_of_memory.BATCHES
                batch = next(batches)[:microbatches]
                watch.label()
                memory.phase = parts_of_memory.REST
                memory.start()
                wire.start()
                watch.microbatch = 0
                engine.step(batch)
    peak = dict(memory.peak)
    if microbatches is not None:
        # The microbatches that were not taken wait in memory, and so do those of earlier steps.
        waiting = 1 + (STEPS_KEPT if config.precision.attribution else 0)
        one = _size(batch) / len(batch)
        peak[parts_of_memory.BATCHES] = round(one * waiting * parts.microbatches)
    return Followed(engine.strategy_reason, peak, wire.sent)


class _Watch:
    """Tells memory and wire where in the step the engine is."""

    def __init__(self, memory: LiveBytes, wire: Wire, loss: Any) -> None:
        self.engine: Engine | None = None
        self.microbatch = 0
        self._memory = memory
        self._wire = wire
        self._loss = loss

    def loss(self, module: nn.Module, batch: Any) -> Any:
        """Compute the loss: what is made on the way is activations, what follows is backward."""
        self._wire.microbatch = self.microbatch
        self.microbatch += 1
        self._label_gradients()
        self._memory.phase = parts_of_memory.ACTIVATIONS
        try:
            return self._loss(module, batch)
        finally:
            self._memory.phase = parts_of_memory.BACKWARD

    def before_update(self, *_: Any) -> None:
        """Note that the optimizer begins."""
        self._label_gradients()
        self._memory.phase = parts_of_memory.OPTIMIZER

    def after_update(self, *_: Any) -> None:
        """Note that the optimizer is through."""
        self._wire.updated = True
        self._memory.phase = parts_of_memory.REST

    def label(self) -> None:
        """Say what the tensors are for that stay from step to step."""
        assert self.engine is not None
        strategy, label = self.engine._strategy, self._memory.label
        label((tensor for _, tensor in strategy.optimizer_parameters()), parts_of_memory.MASTERS)
        label(strategy.module.parameters(), parts_of_memory.PARAMETERS)
        label(strategy.module.buffers(), parts_of_memory.BUFFERS)
        states = pytree.tree_leaves([*self.engine.optimizer.state.values()])
        label(
            (leaf for leaf in states if isinstance(leaf, Tensor)), parts_of_memory.OPTIMIZER_STATE
        )
        self._label_gradients()

    def _label_gradients(self) -> None:
        assert self.engine is not None
        strategy = self.engine._strategy
        self._memory.label(strategy.partial_sums(), parts_of_memory.PARTIAL_SUMS)
        self._memory.label(strategy.gradient_memory(), parts_of_memory.GRADIENTS)


def _size(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
