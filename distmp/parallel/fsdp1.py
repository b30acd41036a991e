"""Fully sharded data parallelism through FSDP1, `FullyShardedDataParallel` (`fsdp1`).

It is for scripts and checkpoints that use FSDP1; prefer `fsdp`. The arithmetic is that of every
other strategy: gradients of each microbatch are summed (not averaged) over ranks and accumulated in
FP32 shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from distmp.distributed.collectives import all_gather
from distmp.distributed.world import World
from distmp.errors import ConfigError, TrainingError
from distmp.optim import OptimizerFactory
from distmp.optim.owners import ShardedMatrix
from distmp.optim.sharded import build_on_shards
from distmp.parallel import fsdp_internals
from distmp.parallel.blocks import find_blocks
from distmp.parallel.collective_order import END_OF_FORWARD, Collective, CollectiveOrder
from distmp.parallel.materialize import (
    InitialValues,
    materialize_buffers,
    materialize_own,
    nothing_to_compute,
)
from distmp.parallel.reduce_scatter import reduce_scatter_sum, reduction_groups
from distmp.parallel.settings import ParallelConfig
from distmp.parallel.sharded import ShardedStrategy, check_shapes
from distmp.parallel.strategy import (
    KnownParameters,
    broadcast_from_rank_zero,
    check_accumulation,
    check_parameters,
    group_of,
    move_to,
    parameter_name,
    store_parameters_in_fp32,
)
from distmp.precision.builders import cast_inputs_and_outputs, fsdp1_policy
from distmp.precision.keep import cast_buffers, keep_in_fp32
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling import GradientPart
from distmp.utils.dtypes import dtype_name
from distmp.utils.flat_shard import FlatShard


class FullySharded1(ShardedStrategy):
    """Every rank holds a shard of the flattened parameters of each block.

    The optimizer steps these shards with the parameter names of the model. They are 1-dim, and
    empty if other ranks hold the parameter.

    Args:
        module: The model; it gets the values of rank 0.
        policy: The precision policy; gathered parameters have its compute dtype.
        world: The ranks to shard over.
        config: Settings of sharding.
        values: The initial values of parameters and buffers that are on the meta device.
    """

    reason = "gradients sharded: FSDP1 accumulates in FP32 only in shards"

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        world: World,
        config: ParallelConfig | None = None,
        values: InitialValues = nothing_to_compute,
    ) -> None:
        config = config or ParallelConfig()
        self._group = group_of(world, "fsdp1")
        if world.world_size == 1:
            raise ConfigError("strategy", "fsdp1", "is for several ranks; use 'single'")
        check_accumulation(policy)
        check_parameters(module, policy)
        check_shapes(module, "fsdp1")
        _check_weights(module, policy)
        self._shapes = {
            parameter_name(name): parameter.shape for name, parameter in module.named_parameters()
        }
        materialize_buffers(module, values, world.device)
        move_to(module, world.device)
        store_parameters_in_fp32(module.parameters())
        broadcast_from_rank_zero(module, world)
        cast_buffers(module, policy)
        kept = [*keep_in_fp32(module, policy, world.device.type).values()]
        cast_inputs_and_outputs(module, policy)
        self._root = _wrap(module, policy, kept, world, config, values)
        self.module = self._root
        self._track_parameters(world)
        self._bounds = self._shard_bounds(world)
        self._known = KnownParameters(self.module)
        # Whether a forward has begun and its backward has not.
        self._open = False
        self._forwards = 0  # since the begin of the step
        self._order = self._watch_collectives(world, policy.reduce_dtype)

    @property
    def model(self) -> nn.Module:
        return self._root.module

    def check_model(self) -> None:
        if not self._open:  # otherwise the model may contain gathered parameters
            self._known.check(self.module)

    def compare_microbatches(self, microbatches: int) -> None:
        self._order.compare_microbatches(microbatches)

    def compare_next(self, has_next: bool) -> None:
        self._order.compare_next(has_next)

    def begin_step(self) -> None:
        if self._open:
            raise TrainingError(
                "FSDP1 cannot continue after a step that failed between forward and backward; "
                "restart from a checkpoint, or use strategy = 'fsdp', which can continue"
            )
        self._order.abandon()
        self._forwards = 0
        super().begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        """Nothing to do: every microbatch is reduced."""

    def end_microbatch(self) -> None:
        for _, parameter in self._trainable:
            if parameter.grad is not None:
                self._record_gradient(parameter)

    def finish_gradients(self) -> None:
        super().finish_gradients()
        self._order.end()

    def gradients(self) -> list[GradientPart]:
        shards = [
            parameter.grad
            for _, parameter in self._trainable
            if parameter.grad is not None and parameter.numel()
        ]
        return [GradientPart(shards, replicas=1)]

    def copy_master_to_model(self) -> None:
        """Nothing to copy: the next forward gathers and casts the shards."""

    def units(self) -> list[tuple[str, nn.Module]]:
        return [
            (parameter_name(f"{name}.").rstrip("."), part.module)
            for name, part in self.module.named_modules()
            if isinstance(part, FullyShardedDataParallel)
        ]

    def frozen_and_buffers(self) -> dict[str, Tensor]:
        return {
            parameter_name(name): buffer
            for name, buffer in self.module.named_buffers(remove_duplicate=False)
        }

    def build_optimizer(
        self, factory: OptimizerFactory, parameters: Sequence[tuple[str, Tensor]]
    ) -> torch.optim.Optimizer:
        return build_on_shards(
            factory, parameters, self._shapes, ("strategy", "fsdp1"), quiet=self._group.rank() > 0
        )

    def sharded_matrix(self, name: str) -> ShardedMatrix | None:
        return ShardedMatrix(self._shapes[name], self._bounds[name])

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return self._group

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        start, stop = self._bounds[name][self._group.rank() :][:2]
        size = stop - start
        return (
            tensor if tensor.shape != (size,) else FlatShard.of(tensor, self._shapes[name], start)
        )

    def _watch_gradients(self, unit: Any, args: Any, output: Any) -> None:
        """Record which parameters have gradients; FSDP1 knows only gradients of flat parameters."""
        if not torch.is_grad_enabled():
            return
        for parameter, view in fsdp_internals.views_of_last_forward(unit):
            if view.requires_grad and self._used.tracks(self._names[id(parameter)]):
                view.register_hook(_calling(self._mark_used, parameter))

    def _shard_bounds(self, world: World) -> dict[str, list[int]]:
        """Return where the shards of each flattened parameter begin, and where the last ends."""
        sizes = torch.tensor([len(parameter) for _, parameter in self._trainable])
        sizes = sizes.to(world.device)
        all_sizes = sizes.new_empty(world.world_size * len(sizes))
        all_gather(all_sizes, sizes, self._group).wait()
        ends = all_sizes.view(world.world_size, -1).cumsum(0).T.tolist()
        return {name: [0, *after] for (name, _), after in zip(self._trainable, ends, strict=True)}

    def _watch_collectives(self, world: World, comm_dtype: torch.dtype) -> CollectiveOrder:
        """Sum over ranks in FP32, and compare the order of gathers and reductions."""
        units = [
            part for part in self.module.modules() if isinstance(part, FullyShardedDataParallel)
        ]
        order = CollectiveOrder(
            world, [*(name for name, _ in self.units()), "a group of parameters"]
        )

        groups = reduction_groups(self._group, world.device, comm_dtype)

        def reduce(_: Any, gradients: Tensor, output: Tensor) -> None:
            self._open = False
            order.note(Collective("reduce", len(units), gradients.numel()))
            reduce_scatter_sum(output, gradients, groups, comm_dtype)

        def enter(unit: Any, args: Any) -> None:
            if unit is self.module:
                self._open = torch.is_grad_enabled()
                self._forwards += self._open
                order.begin(self._forwards if self._open else "evaluation")
            order.note(Collective("gather", units.index(unit), 0))

        def leave(unit: nn.Module, args: Any, output: Any) -> None:
            order.note(END_OF_FORWARD)
            if not torch.is_grad_enabled():
                # There is no backward to do it, and FSDP1 would use old values after an update.
                for unit in units:
                    fsdp_internals.reshard_fsdp1(unit)

        self._root.register_comm_hook(None, reduce)
        for unit in units:
            unit.register_forward_pre_hook(torch.compiler.disable(enter))
            unit.register_forward_hook(torch.compiler.disable(self._watch_gradients))
        self.module.register_forward_hook(torch.compiler.disable(leave))
        return order


def _calling(function: Callable[[nn.Parameter], None], parameter: nn.Parameter) -> Any:
    def hook(_: Tensor) -> None:
        function(parameter)

    return hook


def _wrap(
    module: nn.Module,
    policy: PrecisionPolicy,
    kept: list[nn.Module],
    world: World,
    config: ParallelConfig,
    values: InitialValues,
) -> FullyShardedDataParallel:
    # FP32, because the communication hook converts to the communication dtype.
    computed = replace(
        fsdp1_policy(policy.wide, own_accumulator=True),
        reduce_dtype=torch.float32,
        buffer_dtype=None,
    )
    fp32 = replace(computed, param_dtype=None)
    blocks = {id(block) for block in find_blocks(module, config.sharding.wrap).values()}
    tops = {id(part) for part in kept if any(True for _ in part.parameters())}
    inside = {id(part) for top in kept for part in top.modules()}

    def own_group(part: nn.Module) -> bool | dict[str, Any]:
        if id(part) in tops or (id(part) in blocks and id(part) in inside):
            return {"mixed_precision": fp32}
        return id(part) in blocks

    sharded = config.sharding.reshard_after_forward
    return FullyShardedDataParallel(
        module,
        process_group=world.group,
        sharding_strategy=(
            ShardingStrategy.FULL_SHARD if sharded else ShardingStrategy.SHARD_GRAD_OP
        ),
        auto_wrap_policy=CustomPolicy(own_group),
        mixed_precision=computed,
        param_init_fn=materialize_own(module, values, world.device),
        device_id=world.device,
        use_orig_params=True,
    )


def _check_weights(module: nn.Module, policy: PrecisionPolicy) -> None:
    if policy.param_dtype != torch.float32:
        raise ConfigError(
            "precision.policy",
            policy.name,
            f"steps {dtype_name(policy.param_dtype)} weights, and FSDP1 would accumulate their "
            "gradients in that dtype too; use strategy = 'fsdp'",
        )
    frozen = [name for name, value in module.named_parameters() if not value.requires_grad]
    if frozen:
        raise ConfigError(
            "strategy",
            "fsdp1",
            f"flattens each block and cannot keep {frozen[0]!r} frozen; use 'fsdp'",
        )
