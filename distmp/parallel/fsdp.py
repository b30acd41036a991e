"""Fully sharded data parallelism through FSDP2 (`fsdp`).

FSDP2 gathers and reduces; this module drives it so that the arithmetic is that of every other
strategy: FP32 shards, gradients summed (not averaged) over ranks and accumulated in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from distmp.errors import ConfigError
from distmp.parallel.strategy import (
    Strategy,
    broadcast_from_rank_zero,
    check_parameters,
    store_parameters_in_fp32,
)
from distmp.parallel.world import World
from distmp.precision.builders import cast_inputs_and_outputs, fsdp2_policy
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling import GradientPart


class FullySharded(Strategy):
    """Every rank holds a shard of each parameter, its gradient and its optimizer state.

    Gradients are reduced after every microbatch: the accumulator is then the FP32 shard, and an
    abandoned step leaves nothing behind inside FSDP. FSDP matches the collectives of ranks by their
    order: in every microbatch all ranks have to run the same modules with the same parameters.

    Args:
        module: The model; it starts as rank 0 has it and is sharded in place, one group per block.
        policy: What the gathered parameters are cast to.
        world: The ranks to shard over.
    """

    def __init__(self, module: nn.Module, policy: PrecisionPolicy, world: World) -> None:
        if world.group is None:
            raise ConfigError(
                "strategy", "fsdp", "needs a process group; start the run with torchrun"
            )
        check_parameters(module, policy)
        self.module = module.to(world.device)
        store_parameters_in_fp32(module.parameters())
        broadcast_from_rank_zero(module, world)
        mesh = init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("shard",))
        mp_policy = fsdp2_policy(policy)
        for block in blocks(module):
            fully_shard(block, mesh=mesh, mp_policy=mp_policy)
        fully_shard(module, mesh=mesh, mp_policy=mp_policy)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                # Otherwise the factor is applied by a reduction operator that gloo does not have.
                part.set_force_sum_reduction_for_comms(True)
        cast_inputs_and_outputs(module, policy)
        self._trainable = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._trainable)

    def begin_step(self) -> None:
        for _, parameter in self._trainable:
            parameter.grad = None

    def begin_microbatch(self, *, last: bool) -> None:
        """Nothing to announce: every microbatch is reduced."""

    def finish_gradients(self) -> None:
        """Nothing to wait for: FSDP waits at the end of each backward."""

    def gradients(self) -> list[GradientPart]:
        shards = [
            cast(DTensor, parameter.grad).to_local()
            for _, parameter in self._trainable
            if parameter.grad is not None
        ]
        return [GradientPart(shards, replicas=1)]

    def publish_parameters(self) -> None:
        """Nothing to publish: the next forward gathers and casts the shards."""

    def units(self) -> list[tuple[str, nn.Module]]:
        parts: Iterator[tuple[str, nn.Module]] = self.module.named_modules()
        return [(name, part) for name, part in parts if isinstance(part, FSDPModule)]


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated blocks of a model: the entries of its outermost module lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if _has_parameters(block))
        else:
            yield from blocks(child)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
