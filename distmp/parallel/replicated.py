"""Data parallelism with a whole model on every rank (`single`, `ddp`)."""

from __future__ import annotations

from torch import Tensor, nn

from distmp.buckets import Fp32GradBuckets, MasterWeights
from distmp.parallel.strategy import (
    Strategy,
    broadcast_from_rank_zero,
    check_parameters,
    store_parameters_in_fp32,
)
from distmp.parallel.world import World
from distmp.precision.builders import cast_inputs_and_outputs
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling import GradientPart


class Replicated(Strategy):
    """Every rank holds the whole model; gradients are summed in FP32 buckets.

    Args:
        module: The model; it is moved to the world's device and starts as rank 0 has it.
        policy: With 16-bit parameters the optimizer steps FP32 masters, otherwise the parameters.
        world: The ranks that hold a copy.
    """

    def __init__(self, module: nn.Module, policy: PrecisionPolicy, world: World) -> None:
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
        self._masters = None
        if policy.casts_parameters:
            self._masters = MasterWeights(self._buckets, policy.compute_dtype)
            _cast_frozen_parameters(module, policy)
        cast_inputs_and_outputs(module, policy)

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        if self._masters is None:
            return list(self._trainable)
        return [(name, self._masters.named[name]) for name, _ in self._trainable]

    def begin_step(self) -> None:
        self._buckets.begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        self._buckets.begin_microbatch(last=last)

    def finish_gradients(self) -> None:
        self._buckets.finish()

    def gradients(self) -> list[GradientPart]:
        return [GradientPart(self._buckets.buffers, replicas=self._world_size)]

    def publish_parameters(self) -> None:
        if self._masters is not None:
            self._masters.publish()


def _cast_frozen_parameters(module: nn.Module, policy: PrecisionPolicy) -> None:
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(policy.compute_dtype)
