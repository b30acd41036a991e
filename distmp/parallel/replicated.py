"""Data parallelism with the full model on every rank (`single`, `ddp`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.buckets import FlatParameters, Fp32GradBuckets, PureParameters
from distmp.buckets.layout import dense_strides
from distmp.distributed.world import World
from distmp.errors import require
from distmp.optim.factories import OptimizerFactory
from distmp.optim.owners import ShardedMatrix
from distmp.parallel import strategy
from distmp.parallel.blocks import COMPILED_WHOLE
from distmp.parallel.collective_order import CollectiveOrder
from distmp.parallel.materialize import InitialValues, materialize
from distmp.parallel.module_buffers import BufferBatches, BufferValues, values_of_all_engines
from distmp.parallel.settings import AccumulationSettings
from distmp.precision.builders import prepare
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling.step_decision import GradientPart
from distmp.utils.flat_shard import FlatShard
from distmp.utils.tensor_trees import refuse_shared_memory

logger = logging.getLogger("distmp")

REPRODUCIBLE_ADVICE = "with reproducible=True every rank needs the same number of microbatches"


class Replicated(strategy.Strategy):
    """Every rank holds the full model; gradients are summed in FP32 buckets.

    Args:
        module: The model; it is moved to the world's device and gets the values of rank 0.
        policy: The precision policy. The optimizer updates FP32 master weights if the policy has
            them, otherwise the parameters.
        world: The ranks, each of which holds a copy.
        settings: How gradients are accumulated, reduced and updated.
        values: The initial values of parameters and buffers that are on the meta device.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        world: World,
        settings: AccumulationSettings,
        values: InitialValues,
    ) -> None:
        check_buckets(policy, settings)
        if world.group is not None:
            _check_embeddings(module)
        self._world = world
        if world.group is not None and world.rank == 0 and hasattr(module, "_orig_mod"):
            logger.warning(COMPILED_WHOLE)
        materialize(module, values, world.device)
        self.module = module.to(world.device)
        strategy.store_parameters(module)
        strategy.broadcast_from_rank_zero(module, world)
        named = strategy.trainable(module)
        views = [each for _, each in named if each.stride() != dense_strides(each)]
        if views:
            refuse_shared_memory(module, "model", type(module).__name__)
        moved = [each for _, each in named] if settings.shard_optimizer else views
        strategy.make_contiguous(moved)
        fp32 = {name: parameter.data for name, parameter in named}
        prepare(module, policy.high_precision, world.device.type)
        self._shapes = {name: parameter.shape for name, parameter in named}
        # Copies of the buffers before a microbatch that may be dropped.
        self._buffers: list[BufferValues] = []
        self._drops = settings.on_nonfinite == "drop_microbatch"
        self._buckets = Fp32GradBuckets(
            named,
            world.group,
            reduce_dtype=policy.reduce_dtype,
            shard=settings.shard_optimizer,
            reproducible=settings.reproducible,
            drop_non_finite=self._drops,
        )
        self._buckets.checks_loss = False  # `KnownParameters` and the engine's first step do
        self.used = self._buckets.used
        self._parameters: FlatParameters | PureParameters
        if policy.casts_parameters and not policy.has_masters:
            self._parameters = PureParameters(self._buckets)
        else:
            self._parameters = FlatParameters(self._buckets, fp32)
        self._known = strategy.KnownParameters(module)
        self._buffer_batches = BufferBatches(module)
        if settings.reproducible and world.world_size > 1:
            self._order = CollectiveOrder(world, [], advice=REPRODUCIBLE_ADVICE)

    def check_model(self) -> None:
        self._known.check(self.module)
        self._parameters.check_storage()
        self.check_copies()
        self._buckets.check_storage()

    def check_copies(self) -> None:
        self._parameters.check_copies()

    def watch_copies(self) -> None:
        self._parameters.watch_copies()

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, self._parameters.named[name]) for name in self._shapes]

    def build_optimizer(
        self, factory: OptimizerFactory, parameters: Sequence[tuple[str, Tensor]]
    ) -> torch.optim.Optimizer:
        if not self._buckets.sharded:
            return super().build_optimizer(factory, parameters)
        # Import lazily: most runs do not need it.
        from distmp.optim.optimizer_tensors import build_on_shards

        return build_on_shards(factory, parameters, self._shapes, quiet=self._world.rank > 0)

    def begin_step(self) -> None:
        self._buckets.discard()  # a step may have been interrupted at any point
        self._buckets.begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        if self._drops:
            self._buffers = values_of_all_engines(self._buffer_batches)
        self._buckets.begin_microbatch(last=last)

    def backward_context(self, loss: Tensor) -> AbstractContextManager[None]:
        return self._buckets.backward_context(loss)

    def end_microbatch(self) -> Tensor | None:
        kept = self._buckets.microbatch_is_finite()
        self._buckets.end_microbatch(kept)
        if kept is not None:
            for values in self._buffers:
                values.revert(~kept)
            self._buffers = []
        return kept

    def finish_gradients(self) -> None:
        self._buckets.finish()
        self.check_copies()

    def gradients(self) -> list[GradientPart]:
        if self._buckets.sharded:
            return [GradientPart(self._buckets.shards, replicas=1)]
        return [GradientPart(self._buckets.buffers, replicas=self._world.world_size)]

    def gradient_memory(self) -> dict[str, list[Tensor]]:
        partial_sums, buffers = self._buckets.partial_sums, self._buckets.buffers
        return {"partial sums of microbatches": partial_sums, "FP32 gradients": buffers}

    def gradient_shards(self) -> list[Tensor]:
        return self._buckets.shards

    def prepare_optimizer_grads(self) -> None:
        self._parameters.round_gradients()

    def publish_weights(self) -> None:
        # A step has checked them, and a load replaces them.
        self._parameters.publish_weights(overwrite=True)

    def sharded_matrix(self, name: str) -> ShardedMatrix | None:
        ranks = self._world.world_size
        for layout in self._buckets.layouts if self._buckets.sharded else ():
            if name in layout.names:
                return ShardedMatrix(self._shapes[name], layout.shard_bounds(name, ranks))
        return None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return self._world.group

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FlatShard):  # scales of a shard
            return tensor
        shard = self._parameters.shard_ranges.get(name)
        if shard is not None and tensor.shape == (shard.stop - shard.start,):
            return FlatShard.of(tensor, self._shapes[name], shard.start)
        return tensor


def _check_embeddings(module: nn.Module) -> None:
    """Refuse embeddings that change rows of their weight in forward: those of a rank's samples.

    Raises:
        ConfigError: Naming the first one.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            problem = (
                f"has max_norm={part.max_norm}, which would change other rows on each rank; "
                "normalize what it returns instead"
            )
            require(part.max_norm is None, "model", name, problem)


def check_buckets(policy: PrecisionPolicy, settings: AccumulationSettings) -> None:
    """Refuse a policy whose weights `shard_optimizer` cannot update.

    Raises:
        ConfigError: For weights in 16 bits.
    """
    problem = "a sharded optimizer updates FP32 weights; use param=fp32 or shard_optimizer=False"
    fits = policy.param_dtype == torch.float32 or not settings.shard_optimizer
    require(fits, "precision.policy.param", policy.param_dtype, problem)
