"""Fully sharded data parallelism through FSDP1, `FullyShardedDataParallel` (`fsdp1`).

For scripts and checkpoints that come from it; `fsdp` does the same with less. The arithmetic is
that of every other strategy: gradients of each microbatch are summed (not averaged) over ranks and
accumulated in FP32 shards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from distmp.errors import ConfigError, TrainingError
from distmp.parallel.blocks import find_blocks
from distmp.parallel.collective_order import END_OF_FORWARD, Collective, CollectiveOrder
from distmp.parallel.collectives import all_gather, reduce_scatter_sum
from distmp.parallel.settings import ParallelConfig
from distmp.parallel.strategy import (
    Strategy,
    broadcast_from_rank_zero,
    check_parameters,
    store_parameters_in_fp32,
)
from distmp.parallel.world import World
from distmp.precision.builders import cast_inputs_and_outputs
from distmp.precision.keep import keep_in_fp32
from distmp.precision.policy import PrecisionPolicy, dtype_name
from distmp.scaling import GradientPart

# What FSDP1 puts into the names of wrapped modules.
WRAPPER = "_fsdp_wrapped_module."


class FullySharded1(Strategy):
    """Every rank holds a piece of the flattened parameters of each block.

    The optimizer steps the pieces, 1-dimensional and empty where a parameter lies on other ranks,
    under the names that the model gives them. States are gathered whole for a checkpoint, so that
    every other strategy can load it.

    Args:
        module: The model; it starts as rank 0 has it.
        policy: What the gathered parameters are cast to.
        world: The ranks to shard over.
        config: How to shard.
    """

    reason = "gradients sharded: FSDP1 accumulates in FP32 only there"

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        world: World,
        config: ParallelConfig | None = None,
    ) -> None:
        config = config or ParallelConfig()
        if world.group is None:
            raise ConfigError(
                "strategy", "fsdp1", "needs a process group; start the run with torchrun"
            )
        if world.world_size == 1:
            raise ConfigError("strategy", "fsdp1", "is for several ranks; use 'single'")
        check_parameters(module, policy)
        _check_weights(module, policy)
        self._group = world.group
        self._shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        module.to(world.device)
        store_parameters_in_fp32(module.parameters())
        broadcast_from_rank_zero(module, world)
        kept = [*keep_in_fp32(module, policy, world.device.type).values()]
        cast_inputs_and_outputs(module, policy)
        self._root = _wrap(module, policy, kept, world, config)
        self.module = self._root
        self._trainable = [
            (_plain_name(name), parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]
        self._sizes = self._gather_sizes(world)
        # Whether a forward has begun that no backward has followed.
        self._open = False
        self._order = self._watch_collectives(world, policy.reduce_dtype)

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._trainable)

    def begin_step(self) -> None:
        if self._open:
            raise TrainingError(
                "FSDP1 cannot go on after a step that failed between forward and backward; start "
                "again from a checkpoint, or use strategy = 'fsdp', which can"
            )
        self._order.abandon()
        for _, parameter in self._trainable:
            parameter.grad = None

    def begin_microbatch(self, *, last: bool) -> None:
        """Nothing to announce: every microbatch is reduced."""

    def finish_gradients(self) -> None:
        # Nothing to wait for: FSDP waits at the end of each backward.
        self._order.end()

    def gradients(self) -> list[GradientPart]:
        pieces = [
            parameter.grad
            for _, parameter in self._trainable
            if parameter.grad is not None and parameter.numel()
        ]
        return [GradientPart(pieces, replicas=1)]

    def publish_parameters(self) -> None:
        """Nothing to publish: the next forward gathers and casts the pieces."""

    def units(self) -> list[tuple[str, nn.Module]]:
        return [
            (_plain_name(f"{name}.").rstrip("."), part.module)
            for name, part in self.module.named_modules()
            if isinstance(part, FullyShardedDataParallel)
        ]

    def untrained(self) -> dict[str, Tensor]:
        return {
            _plain_name(name): buffer
            for name, buffer in self.module.named_buffers(remove_duplicate=False)
        }

    @torch.no_grad()
    def whole_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        # A rank that holds nothing of a parameter has no optimizer state of it.
        mine = {
            name: (value.dtype, value.dim(), value.cpu() if value.dim() == 0 else None)
            for name, value in state.items()
        }
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, mine, group=self._group)
        known = {name: kind for ranks in reversed(everyone) for name, kind in ranks.items()}
        whole = {}
        for name, (dtype, dimensions, value) in sorted(known.items()):
            parameter = self._parameter_of(name)
            if parameter is None or dimensions == 0:
                whole[name] = state.get(name, value)
            else:
                piece = state.get(name, torch.empty(0, dtype=dtype))
                whole[name] = self._gather(piece, parameter)
        return whole

    def local_part(self, name: str, whole: Tensor) -> Tensor:
        parameter = self._parameter_of(name)
        if parameter is None or whole.shape != self._shapes[parameter] or whole.dim() == 0:
            return whole
        sizes, rank = self._sizes[parameter], self._group.rank()
        return whole.reshape(-1).narrow(0, sum(sizes[:rank]), sizes[rank])

    def _parameter_of(self, entry: str) -> str | None:
        """Return the trained parameter that an entry of a state belongs to."""
        section, _, rest = entry.partition("/")
        name = rest if section == "model" else rest.rpartition("/")[0]
        return name if section in ("model", "optimizer") and name in self._sizes else None

    def _gather(self, piece: Tensor, parameter: str) -> Tensor:
        sizes = self._sizes[parameter]
        device = self._trainable[0][1].device
        padded = torch.zeros(max(sizes), dtype=piece.dtype, device=device)
        padded[: len(piece)].copy_(piece)
        gathered = padded.new_empty(len(sizes) * max(sizes))
        all_gather(gathered, padded, group=self._group)
        pieces = [
            row[:size] for row, size in zip(gathered.view(len(sizes), -1), sizes, strict=True)
        ]
        return torch.cat(pieces).view(self._shapes[parameter])

    def _gather_sizes(self, world: World) -> dict[str, list[int]]:
        """Return how many elements of each parameter each rank holds, in the order of ranks."""
        mine = torch.tensor([len(parameter) for _, parameter in self._trainable])
        mine = mine.to(world.device)
        everyone = mine.new_empty(world.world_size * len(mine))
        all_gather(everyone, mine, group=self._group)
        by_parameter = everyone.view(world.world_size, -1).T.tolist()
        return {name: sizes for (name, _), sizes in zip(self._trainable, by_parameter, strict=True)}

    def _watch_collectives(self, world: World, wire_dtype: torch.dtype) -> CollectiveOrder:
        """Sum over ranks in FP32, and compare the order of what ranks gather and reduce."""
        units = [
            part for part in self.module.modules() if isinstance(part, FullyShardedDataParallel)
        ]
        order = CollectiveOrder(
            world, [*(name for name, _ in self.units()), "a group of parameters"]
        )

        def reduce(_: Any, gradients: Tensor, output: Tensor) -> None:
            self._open = False
            order.note(Collective("reduce", len(units), gradients.numel()))
            reduce_scatter_sum(output, gradients, self._group, wire_dtype)

        def enter(unit: Any, args: Any) -> None:
            if unit is self.module:
                self._open = torch.is_grad_enabled()
                order.begin(self._open)
            order.note(Collective("gather", units.index(unit), 0))

        def leave(unit: nn.Module, args: Any, output: Any) -> None:
            order.note(END_OF_FORWARD)

        self._root.register_comm_hook(None, reduce)
        for unit in units:
            unit.register_forward_pre_hook(torch.compiler.disable(enter))
        self.module.register_forward_hook(torch.compiler.disable(leave))
        return order


def _wrap(
    module: nn.Module,
    policy: PrecisionPolicy,
    kept: list[nn.Module],
    world: World,
    config: ParallelConfig,
) -> FullyShardedDataParallel:
    # Nothing is cast on the way in: the root does it once, in `cast_inputs_and_outputs`.
    computed = MixedPrecision(
        param_dtype=policy.compute_dtype if policy.casts_parameters else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
        _module_classes_to_ignore=(),
    )
    fp32 = MixedPrecision(
        reduce_dtype=torch.float32, cast_root_forward_inputs=False, _module_classes_to_ignore=()
    )
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
        device_id=world.device,
        use_orig_params=True,
    )


def _check_weights(module: nn.Module, policy: PrecisionPolicy) -> None:
    if policy.param_dtype != torch.float32:
        raise ConfigError(
            "precision.policy",
            policy.name,
            f"steps {dtype_name(policy.param_dtype)} weights, and FSDP1 would add up their "
            "gradients in that type too; use strategy = 'fsdp'",
        )
    frozen = [name for name, value in module.named_parameters() if not value.requires_grad]
    if frozen:
        raise ConfigError(
            "strategy",
            "fsdp1",
            f"flattens whole blocks and cannot keep {frozen[0]!r} frozen; use 'fsdp'",
        )


def _plain_name(name: str) -> str:
    return name.replace(WRAPPER, "")
