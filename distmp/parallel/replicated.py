"""Data parallelism with a whole model on every rank (`single`, `ddp`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distmp.buckets import FlatParameters, Fp32GradBuckets, PureParameters
from distmp.errors import ConfigError
from distmp.optim import OptimizerFactory
from distmp.parallel.strategy import (
    AccumulationSettings,
    Strategy,
    broadcast_from_rank_zero,
    check_parameters,
    store_parameters_in_fp32,
    trainable,
)
from distmp.parallel.world import World
from distmp.precision.builders import prepare
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling import GradientPart
from distmp.slices import FlatSlice


class Replicated(Strategy):
    """Every rank holds the whole model; gradients are summed in FP32 buckets.

    Args:
        module: The model; it is moved to the world's device and starts as rank 0 has it.
        policy: With 16-bit parameters the optimizer steps FP32 masters, or the parameters if the
            policy has none; otherwise the parameters.
        world: The ranks that hold a copy.
        settings: How gradients are accumulated and stepped.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        world: World,
        settings: AccumulationSettings | None = None,
    ) -> None:
        settings = settings or AccumulationSettings()
        _check_buckets(policy, settings)
        check_parameters(module, policy)
        self.module = module.to(world.device)
        self._world_size = world.world_size
        store_parameters_in_fp32(module.parameters())
        broadcast_from_rank_zero(module, world)
        named = trainable(module)
        self._shapes = {name: parameter.shape for name, parameter in named}
        values = {name: parameter.data for name, parameter in named}
        prepare(module, policy, world.device.type)
        if settings.shard_optimizer:
            _make_contiguous(module)
        self._buckets = Fp32GradBuckets(
            named,
            world.group,
            reduce_dtype=policy.reduce_dtype,
            shard=settings.shard_optimizer,
            reproducible=settings.reproducible,
            drop_non_finite=settings.drop_non_finite,
        )
        self._parameters: FlatParameters | PureParameters
        if policy.casts_parameters and not policy.has_masters:
            self._parameters = PureParameters(self._buckets)
        else:
            self._parameters = FlatParameters(self._buckets, values)

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, self._parameters.named[name]) for name in self._shapes]

    def build_optimizer(self, factory: OptimizerFactory) -> torch.optim.Optimizer:
        if not self._buckets.sharded:
            return super().build_optimizer(factory)
        # Imported here: most runs have no use for it.
        from distmp.optim.sharded import build_on_shares

        return build_on_shares(factory, self.optimizer_parameters(), self._shapes)

    def begin_step(self) -> None:
        self._buckets.begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        self._buckets.begin_microbatch(last=last)

    def end_microbatch(self) -> Tensor | None:
        return self._buckets.end_microbatch()

    def finish_gradients(self) -> None:
        self._buckets.finish()

    def gradients(self) -> list[GradientPart]:
        if self._buckets.sharded:
            return [GradientPart(self._buckets.shards, replicas=1)]
        return [GradientPart(self._buckets.buffers, replicas=self._world_size)]

    def gradient_shards(self) -> list[Tensor]:
        return self._buckets.shards

    def hand_over_gradients(self) -> None:
        if isinstance(self._parameters, PureParameters):
            self._parameters.round_gradients()

    def publish_parameters(self) -> None:
        self._parameters.publish()

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        share = self._parameters.shares.get(name)
        if share is None or tensor.shape != (share.stop - share.start,):
            return tensor
        return FlatSlice.of(tensor, self._shapes[name], share.start)


def _check_buckets(policy: PrecisionPolicy, settings: AccumulationSettings) -> None:
    """Refuse what the buckets would do otherwise than the policy says."""
    if policy.accumulate_dtype != torch.float32:
        raise ConfigError(
            "precision.policy.accumulate",
            policy.accumulate_dtype,
            "the strategies single and ddp sum microbatches in FP32 buckets; use fp32",
        )
    if settings.shard_optimizer and policy.param_dtype != torch.float32:
        raise ConfigError(
            "precision.policy.param",
            policy.param_dtype,
            "a sharded optimizer steps FP32 weights; use param=fp32 or shard_optimizer=False",
        )


@torch.no_grad()
def _make_contiguous(module: nn.Module) -> None:
    """Lay parameters out in row-major order, in which a share is a run of elements."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
