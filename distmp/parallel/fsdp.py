"""Fully sharded data parallelism through FSDP2 (`fsdp`, and `hsdp` with several copies).

FSDP2 gathers and reduces; this module drives it so that the arithmetic is that of every other
strategy: gradients summed (not averaged) over ranks and accumulated in FP32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from distmp.distributed.collectives import all_gather
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel import fsdp_internals
from distmp.parallel.accumulation import AccumulationMemory, choose, least_free_bytes
from distmp.parallel.blocks import find_blocks
from distmp.parallel.collective_order import END_OF_FORWARD, Collective, CollectiveOrder
from distmp.parallel.reduce_scatter import reduce_scatter_sum
from distmp.parallel.settings import ParallelConfig, ShardingConfig
from distmp.parallel.sharded import ShardedStrategy
from distmp.parallel.strategy import (
    KnownParameters,
    broadcast_from_rank_zero,
    check_parameters,
    group_of,
    narrow_parameters,
    parameter_name,
    store_parameters_in_fp32,
    trainable,
)
from distmp.precision.builders import cast_inputs_and_outputs, fsdp2_policy
from distmp.precision.keep import cast_buffers, keep_in_fp32
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling import GradientPart
from distmp.utils.dtypes import dtype_name


class FullySharded(ShardedStrategy):
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
        group_of(world, name)
        _check_offload(config.sharding, world)
        check_parameters(module, policy)
        _check_shapes(module, name)
        _check_accumulator(policy)
        shards = shard_size(config.sharding, world) if name == "hsdp" else world.world_size
        self._replicas = world.world_size // shards
        self._param_dtype = policy.param_dtype
        self.module = _move(module, world.device, parameters=not config.sharding.offload)
        store_parameters_in_fp32(module.parameters())
        broadcast_from_rank_zero(module, world)
        cast_buffers(module, policy)
        kept = [*keep_in_fp32(module, policy, world.device.type).values()]
        narrow_parameters(module, policy.param_dtype, except_for=kept)
        self._frozen_in_fp32 = _frozen_beside_narrow(module, policy, kept)
        _shard(module, policy, kept, _mesh(world, shards, name), config.sharding)
        self._root = cast(FSDPModule, module)
        self._order = self._watch_collectives(world, policy, kept)
        self._prepare_gradients()
        cast_inputs_and_outputs(module, policy)
        self._follow(world)
        self._known = KnownParameters(module)
        self.accumulation = choose(
            config.sharding.accumulate,
            AccumulationMemory(
                elements=sum(parameter.numel() for _, parameter in self._trainable),
                free_bytes=least_free_bytes(world),
                shard_size=shards,
                replicas=self._replicas,
                gradient_bytes=policy.module_dtype.itemsize,
                wire_bytes=policy.reduce_dtype.itemsize,
                weight_bytes=policy.param_dtype.itemsize,
                microbatches=config.microbatches,
            ),
        )
        self.reason = f"gradients {self.accumulation.place}: {self.accumulation.reason}"
        if name == "hsdp":
            self.reason = f"{self._replicas} copies on {shards} ranks each; {self.reason}"
        # Whether something of an unfinished step may wait inside FSDP.
        self._unfinished = False
        self._last_microbatch = True
        # Forward passes of this microbatch.
        self._forwards = 0

    def check_model(self) -> None:
        if self._unfinished:
            return  # a failed step has left gathered parameters in the model
        try:
            self._known.check(self.module)
        except ConfigError:
            self._reshard()  # a forward outside of the engine has left gathered parameters
            self._known.check(self.module)

    def unfrozen(self) -> list[tuple[str, nn.Parameter]]:
        known = {name for name, _ in self._trainable}
        return [entry for entry in trainable(self.module) if entry[0] not in known]

    def adopt(self, unfrozen: list[tuple[str, nn.Parameter]]) -> list[tuple[str, Tensor]]:
        for name, parameter in unfrozen:
            if name in self._frozen_in_fp32:
                raise ConfigError(
                    "model",
                    name,
                    "was unfrozen, and under a policy that steps "
                    f"{dtype_name(self._param_dtype)} weights FSDP holds it in float32; build the "
                    "engine with it trainable and freeze it then",
                )
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    "model",
                    name,
                    f"was unfrozen, but its shards are {dtype_name(parameter.dtype)}; hand it over "
                    "in float32",
                )
        self._train(unfrozen)
        self._known = KnownParameters(self.module)
        return [*unfrozen]

    def announce(self, microbatches: int) -> None:
        if self._order is not None:
            self._order.announce(microbatches)

    def begin_step(self) -> None:
        if self._unfinished:
            self._discard()
        super().begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        self._unfinished = True
        self._last_microbatch = last
        self._forwards = 0
        if self.accumulation.place == "unsharded":
            self._root.set_requires_gradient_sync(last)
        elif self.accumulation.place == "hybrid":
            self._root.set_requires_all_reduce(last)

    def finish_gradients(self) -> None:
        super().finish_gradients()
        if self._order is not None:
            self._order.end()
        self._unfinished = False

    def gradients(self) -> list[GradientPart]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for _, parameter in self._trainable:
            if parameter.grad is not None:
                shard = cast(DTensor, parameter.grad).to_local()
                if shard.numel():  # a rank may hold no row of a parameter, and none at all
                    by_dtype.setdefault(shard.dtype, []).append(shard)
        return [GradientPart(shards, self._replicas) for shards in by_dtype.values()]

    def gradient_memory(self) -> list[Tensor]:
        return [*super().gradient_memory(), *fsdp_internals.waiting_gradients(self.module)]

    def copy_master_to_model(self) -> None:
        """Nothing to publish: the next forward gathers and casts the shards."""

    def units(self) -> list[tuple[str, nn.Module]]:
        parts: Iterator[tuple[str, nn.Module]] = self.module.named_modules()
        return [(name, part) for name, part in parts if isinstance(part, FSDPModule)]

    def _watch_collectives(
        self, world: World, policy: PrecisionPolicy, kept: Sequence[nn.Module]
    ) -> CollectiveOrder | None:
        """Put distmp's collectives in the place of FSDP's: summed in FP32, their order compared."""
        units = self.units()
        order = (
            CollectiveOrder(world, [name for name, _ in units]) if world.world_size > 1 else None
        )
        in_fp32 = _all_parts(kept)
        for index, (_, part) in enumerate(units):
            unit = cast(FSDPModule, part)
            wire = torch.float32 if id(part) in in_fp32 else policy.reduce_dtype
            # Any: torch describes them by abstract classes that it does not export.
            gather: Any = _AllGather(order, index)
            reduce: Any = _ReduceScatter(order, index, wire)
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)
            # Per module, not recursive.
            unit.set_gradient_divide_factor(1.0)
            # Otherwise the factor is applied by a reduction operator that gloo does not have.
            unit.set_force_sum_reduction_for_comms(True)
        fsdp_internals.reduce_what_is_unused(self.module, self._note)
        self.module.register_forward_pre_hook(
            torch.compiler.disable(self._begin_forward), prepend=True
        )
        self.module.register_forward_hook(torch.compiler.disable(self._end_forward))
        return order

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if self._order is None:
            return
        if torch.is_grad_enabled():
            self._forwards += 1
            self._order.begin((self._forwards, self._last_microbatch))
        else:
            self._order.begin("evaluation")

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._order is not None:
            self._order.note(END_OF_FORWARD)
        if not torch.is_grad_enabled():
            # No backward will do it, and the next forward may follow an update or a checkpoint.
            self._reshard()

    def _reshard(self) -> None:
        for _, part in self.units():
            cast(FSDPModule, part).reshard()

    def _prepare_gradients(self) -> None:
        # Only when it gathers does FSDP make the tensors that gradients are accumulated in. One
        # group after the other, as the whole model may not fit.
        for _, part in self.units():
            unit = cast(FSDPModule, part)
            unit.unshard()
            unit.reshard()
        fsdp_internals.check(self.module)
        fsdp_internals.accumulate_in_fp32(self.module)

    def _discard(self) -> None:
        """Forget what an abandoned step has left inside FSDP."""
        if hasattr(self._root, "reset_iter_state"):  # torch 2.13
            self._root.reset_iter_state()
        self._reshard()
        fsdp_internals.discard_gradients(self.module)
        if self._order is not None:
            self._order.abandon()
        self._unfinished = False


class _AllGather:
    """What FSDP gathers with: torch's own collective, its place in the order compared before."""

    def __init__(self, order: CollectiveOrder | None, unit: int) -> None:
        self._order = order
        self._unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        if self._order is not None:
            self._order.note(Collective("gather", self._unit, input_tensor.numel()))
        work = all_gather(output_tensor, input_tensor, group)
        if async_op:
            return work
        work.wait()
        return None


class _ReduceScatter(_AllGather):
    """What FSDP reduces with: a sum in FP32, whatever travels."""

    def __init__(self, order: CollectiveOrder | None, unit: int, comm_dtype: torch.dtype) -> None:
        super().__init__(order, unit)
        self._comm_dtype = comm_dtype

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        if self._order is not None:
            self._order.note(Collective("reduce", self._unit, input_tensor.numel()))
        reduce_scatter_sum(output_tensor, input_tensor, group, self._comm_dtype)
        if input_tensor.device.type == "cpu":
            # FSDP keeps it until the next group is reduced, for streams that CPUs do not have.
            input_tensor.untyped_storage().resize_(0)


def shard_size(sharding: ShardingConfig, world: World) -> int:
    """Return how many ranks share one copy of the model under `hsdp`.

    Raises:
        ConfigError: If the ranks cannot be divided so.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
    size = local if sharding.shard_size is None else sharding.shard_size
    if world.world_size % size:
        fitting = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
        raise ConfigError(
            "sharding.shard_size",
            size,
            f"does not divide the {world.world_size} ranks; use one of "
            f"{', '.join(map(str, fitting))}",
        )
    return size


def _mesh(world: World, shards: int, name: str) -> DeviceMesh:
    kind = world.device.type
    if name == "fsdp":
        return init_device_mesh(kind, (shards,), mesh_dim_names=("shard",))
    shape = (world.world_size // shards, shards)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def _shard(
    module: nn.Module,
    policy: PrecisionPolicy,
    kept: Sequence[nn.Module],
    mesh: DeviceMesh,
    sharding: ShardingConfig,
) -> None:
    """Make groups of parameters: the blocks, what is kept in FP32 within each, and the rest."""
    # The sum over ranks is always FP32; what travels is the business of `_ReduceScatter`.
    computed = replace(fsdp2_policy(policy, own_accumulator=True), reduce_dtype=torch.float32)
    fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if sharding.offload else OffloadPolicy()
    in_fp32 = _all_parts(kept)
    done: set[int] = set()

    def group(parts: list[nn.Module], reshard: bool | None) -> None:
        done.update(map(id, parts))
        fully_shard(
            parts[0] if len(parts) == 1 else parts,
            mesh=mesh,
            mp_policy=fp32 if id(parts[0]) in in_fp32 else computed,
            reshard_after_forward=reshard,
            offload_policy=offload,
        )

    def group_kept(holder: nn.Module, reshard: bool) -> None:
        inside = _all_parts([holder])
        parts = [
            part
            for part in kept
            if id(part) in inside and id(part) not in done and any(True for _ in part.parameters())
        ]
        if parts and holder is not parts[0]:
            group(parts, reshard)

    # Inner ones first, as FSDP wants it.
    for block in reversed(find_blocks(module, sharding.wrap).values()):
        group_kept(block, sharding.reshard_after_forward)
        group([block], sharding.reshard_after_forward)
    # As the root, whose parameters other modules may use (a tied head).
    group_kept(module, reshard=False)
    group([module], None)


def _frozen_beside_narrow(
    module: nn.Module, policy: PrecisionPolicy, kept: Sequence[nn.Module]
) -> frozenset[str]:
    """Return frozen parameters in groups whose gradients FSDP hands over in 16 bits."""
    if policy.param_dtype == torch.float32:
        return frozenset()
    in_fp32 = {id(parameter) for part in kept for parameter in part.parameters()}
    return frozenset(
        parameter_name(name)
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and id(parameter) not in in_fp32
    )


def _all_parts(modules: Sequence[nn.Module]) -> set[int]:
    return {id(part) for module in modules for part in module.modules()}


def _check_shapes(module: nn.Module, strategy: str) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                "strategy",
                strategy,
                f"shards parameters by rows, and {name!r} is a single number of shape (); give it "
                "the shape (1,), or use 'ddp'",
            )
        if parameter.numel() == 0 and parameter.requires_grad:
            raise ConfigError(
                "strategy",
                strategy,
                f"cannot shard {name!r} of shape {tuple(parameter.shape)}, which has no elements; "
                "freeze or remove it, or use 'ddp'",
            )


def _check_accumulator(policy: PrecisionPolicy) -> None:
    if policy.accumulate_dtype != torch.float32:
        raise ConfigError(
            "precision.policy.accumulate",
            policy.accumulate_dtype,
            "the strategies fsdp and hsdp sum microbatches in FP32; use fp32",
        )


def _check_offload(sharding: ShardingConfig, world: World) -> None:
    if sharding.offload and world.device.type == "cpu":
        raise ConfigError(
            "sharding.offload",
            True,
            "this run computes on the CPU, whose memory holds everything already; set it to false",
        )


def _move(module: nn.Module, device: torch.device, *, parameters: bool) -> nn.Module:
    if parameters:
        return module.to(device)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module
