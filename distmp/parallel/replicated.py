"""Data parallelism with a whole model on every rank (`single`, `ddp`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distmp.buckets import Fp32GradBuckets, MasterWeights, PureWeights
from distmp.errors import ConfigError
from distmp.parallel.strategy import (
    Strategy,
    broadcast_from_rank_zero,
    check_parameters,
    store_parameters_in_fp32,
)
from distmp.parallel.world import World
from distmp.precision.builders import prepare
from distmp.precision.keep import storage_dtypes
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling import GradientPart


class Replicated(Strategy):
    """Every rank holds the whole model; gradients are summed in FP32 buckets.

    Args:
        module: The model; it is moved to the world's device and starts as rank 0 has it.
        policy: With 16-bit parameters the optimizer steps FP32 masters, or the parameters if the
            policy has none; otherwise the parameters.
        world: The ranks that hold a copy.
    """

    def __init__(self, module: nn.Module, policy: PrecisionPolicy, world: World) -> None:
        _check_buckets(policy)
        check_parameters(module, policy)
        self.module = module.to(world.device)
        self._world_size = world.world_size
        store_parameters_in_fp32(module.parameters())
        broadcast_from_rank_zero(module, world)
        self._trainable = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        self._buckets = Fp32GradBuckets(self._trainable, world.group)
        dtypes = storage_dtypes(module, policy)
        self._masters = self._pure = None
        if policy.has_masters:
            kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
            self._masters = MasterWeights(self._buckets, policy.compute_dtype, kept)
        elif policy.casts_parameters:
            self._pure = PureWeights(self._buckets, dtypes)
        # With what is trained this changes nothing, it has its type already.
        prepare(module, policy, world.device.type)

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        weights = self._masters or self._pure
        if weights is None:
            return list(self._trainable)
        return [(name, weights.named[name]) for name, _ in self._trainable]

    def begin_step(self) -> None:
        self._buckets.begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        self._buckets.begin_microbatch(last=last)

    def finish_gradients(self) -> None:
        self._buckets.finish()

    def gradients(self) -> list[GradientPart]:
        return [GradientPart(self._buckets.buffers, replicas=self._world_size)]

    def hand_over_gradients(self) -> None:
        if self._pure is not None:
            self._pure.round_gradients()

    def publish_parameters(self) -> None:
        if self._masters is not None:
            self._masters.publish()
        if self._pure is not None:
            self._pure.drop_gradients()


def _check_buckets(policy: PrecisionPolicy) -> None:
    """Refuse what the buckets would do better, but otherwise, than the policy says."""
    for key, dtype in (("reduce", policy.reduce_dtype), ("accumulate", policy.accumulate_dtype)):
        if dtype != torch.float32:
            raise ConfigError(
                f"precision.policy.{key}",
                dtype,
                "the strategies single and ddp have FP32 buckets; use fp32",
            )
