"""Fully sharded data parallelism through FSDP2 (`fsdp`, and `hsdp` with several copies).

FSDP2 gathers and reduces; this module drives it so that the arithmetic is that of every other
strategy: FP32 shards, gradients summed (not averaged) over ranks and accumulated in FP32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distmp.errors import ConfigError
from distmp.parallel import fsdp_internals
from distmp.parallel.accumulation import Choice, Facts, choose, least_free_bytes
from distmp.parallel.blocks import find_blocks
from distmp.parallel.collective_order import Collective, CollectiveOrder
from distmp.parallel.reduce_scatter import reduce_scatter_sum
from distmp.parallel.settings import ParallelConfig, ShardingConfig
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

    With `hsdp` a shard group of `sharding.shard_size` ranks shares one copy of the model, and the
    groups hold copies of one another.

    FSDP matches the collectives of ranks by their order: in every microbatch all ranks have to run
    the same modules. `CollectiveOrder` raises where they do not.

    Args:
        module: The model; it starts as rank 0 has it and is sharded in place, one group per block.
        policy: What the gathered parameters are cast to.
        world: The ranks to shard over.
        config: How to shard.
        name: "fsdp" or "hsdp".

    Attributes:
        accumulation: Where gradients of microbatches are added up, and why.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        world: World,
        config: ParallelConfig | None = None,
        name: str = "fsdp",
    ) -> None:
        config = config or ParallelConfig()
        if world.group is None:
            raise ConfigError(
                "strategy", name, "needs a process group; start the run with torchrun"
            )
        _check_offload(config.sharding, world)
        check_parameters(module, policy)
        self.module = _move(module, world.device, parameters=not config.sharding.offload)
        store_parameters_in_fp32(module.parameters())
        broadcast_from_rank_zero(module, world)
        shards = shard_size(config.sharding, world) if name == "hsdp" else world.world_size
        self._replicas = world.world_size // shards
        _shard(module, policy, _mesh(world, shards, name), config.sharding)
        self._root = cast(FSDPModule, module)
        self._order = self._watch_collectives(world)
        self._gather_once()
        cast_inputs_and_outputs(module, policy)
        self._trainable = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        self.accumulation = self._choose_accumulation(policy, world, config, shards)
        self.reason = f"accumulates {self.accumulation.place}: {self.accumulation.reason}"
        if name == "hsdp":
            self.reason = f"{self._replicas} x {shards} ranks, {self.reason}"
        # Whether gradients of an unfinished step may wait inside FSDP.
        self._unfinished = False

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._trainable)

    def begin_step(self) -> None:
        if self._unfinished:
            self._discard()
        for _, parameter in self._trainable:
            parameter.grad = None

    def begin_microbatch(self, *, last: bool) -> None:
        self._unfinished = True
        if self.accumulation.place == "unsharded":
            self._root.set_requires_gradient_sync(last)
        elif self.accumulation.place == "hybrid":
            self._root.set_requires_all_reduce(last)

    def finish_gradients(self) -> None:
        """Nothing to wait for: FSDP waits at the end of each backward."""
        if self._order is not None:
            self._order.end()
        self._unfinished = False

    def gradients(self) -> list[GradientPart]:
        shards = [
            cast(DTensor, parameter.grad).to_local()
            for _, parameter in self._trainable
            if parameter.grad is not None
        ]
        return [GradientPart(shards, replicas=self._replicas)]

    def publish_parameters(self) -> None:
        """Nothing to publish: the next forward gathers and casts the shards."""

    def units(self) -> list[tuple[str, nn.Module]]:
        parts: Iterator[tuple[str, nn.Module]] = self.module.named_modules()
        return [(name, part) for name, part in parts if isinstance(part, FSDPModule)]

    def _gather_once(self) -> None:
        """Gather every group, since FSDP makes what gradients are accumulated in only then."""
        for _, part in self.units():
            unit = cast(FSDPModule, part)
            unit.unshard()
            unit.reshard()
        fsdp_internals.check(self.module)
        fsdp_internals.accumulate_in_fp32(self.module)

    def _watch_collectives(self, world: World) -> CollectiveOrder | None:
        """Put distmp's collectives in the place of FSDP's: summed in FP32, their order compared."""
        units = self.units()
        order = CollectiveOrder(world, [name for name, _ in units]) if world.world_size > 1 else None
        for index, (_, part) in enumerate(units):
            unit = cast(FSDPModule, part)
            unit.set_custom_all_gather(_AllGather(order, index))
            unit.set_custom_reduce_scatter(_ReduceScatter(order, index, torch.float32))
            unit.set_gradient_divide_factor(1.0)
            # Otherwise the factor is applied by a reduction operator that gloo does not have.
            unit.set_force_sum_reduction_for_comms(True)
        # A parameter without a gradient on this rank may have one on another (torch 2.13).
        if hasattr(self._root, "set_reduce_scatter_unused_params"):
            self._root.set_reduce_scatter_unused_params(True)
        if order is not None:
            self.module.register_forward_pre_hook(self._begin_pass, prepend=True)
        return order

    def _begin_pass(self, module: nn.Module, args: Any) -> None:
        assert self._order is not None
        training = torch.is_grad_enabled() and self._unfinished
        self._order.begin((training, training and self._reduces_now))

    def _choose_accumulation(
        self, policy: PrecisionPolicy, world: World, config: ParallelConfig, shards: int
    ) -> Choice:
        return choose(
            config.sharding.accumulate,
            Facts(
                elements=sum(parameter.numel() for _, parameter in self._trainable),
                free_bytes=least_free_bytes(world),
                shard_size=shards,
                replicas=self._replicas,
                wire_bytes=torch.float32.itemsize,
                lossless_wire=policy.casts_parameters,
                microbatches=config.microbatches,
            ),
        )

    def _discard(self) -> None:
        """Forget what an abandoned step has left inside FSDP."""
        if hasattr(self._root, "reset_iter_state"):  # torch 2.13
            self._root.reset_iter_state()
        fsdp_internals.discard_gradients(self.module)
        if self._order is not None:
            self._order.abandon()
        self._unfinished = False
