"""Data parallelism with a whole model on every rank (`single`, `ddp`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distmp.buckets import FlatParameters, Fp32GradBuckets
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
from distmp.precision.builders import cast_inputs_and_outputs
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling import GradientPart
from distmp.slices import FlatSlice

logger = logging.getLogger("distmp")


class _Part(NamedTuple):
    """Parameters that became trainable at the same time."""

    buckets: Fp32GradBuckets
    parameters: FlatParameters


class Replicated(Strategy):
    """Every rank holds the whole model; gradients are summed in FP32 buckets.

    Args:
        module: The model; it is moved to the world's device and starts as rank 0 has it.
        policy: With 16-bit parameters the optimizer steps FP32 masters, otherwise the parameters.
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
        self._settings = settings or AccumulationSettings()
        self._policy = policy
        self._world = world
        check_parameters(module, policy)
        if world.group is not None and hasattr(module, "_orig_mod"):
            logger.warning(
                "the whole model is compiled: all gradients come at the end of backward, and no "
                "reduction overlaps with it; compile its blocks instead (block.compile())"
            )
        self.module = module.to(world.device)
        store_parameters_in_fp32(module.parameters())
        broadcast_from_rank_zero(module, world)
        self._shapes: dict[str, torch.Size] = {}
        self._parts = [self._prepare(trainable(module))]
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self._storage_dtype(parameter))
        cast_inputs_and_outputs(module, policy)

    def _prepare(self, named: list[tuple[str, nn.Parameter]]) -> _Part:
        """Put parameters with FP32 values into buckets."""
        self._shapes.update((name, parameter.shape) for name, parameter in named)
        values = {name: parameter.data for name, parameter in named}
        for _, parameter in named:
            parameter.data = parameter.data.to(self._storage_dtype(parameter))
            if self._settings.shard_optimizer:  # a share is a run of elements in row-major order
                parameter.data = parameter.data.contiguous()
        buckets = Fp32GradBuckets(
            named,
            self._world.group,
            reduce_dtype=self._policy.reduce_dtype,
            shard=self._settings.shard_optimizer,
            reproducible=self._settings.reproducible,
            drop_non_finite=self._settings.drop_non_finite,
            overlap=not self._shapes.keys() - values.keys(),
        )
        return _Part(buckets, FlatParameters(buckets, values))

    def _storage_dtype(self, parameter: Tensor) -> torch.dtype:
        return self._policy.compute_dtype if self._policy.casts_parameters else parameter.dtype

    def adopt_unfrozen(self) -> list[tuple[str, Tensor]]:
        named = [entry for entry in trainable(self.model) if entry[0] not in self._shapes]
        if not named:
            return []
        for _, parameter in named:
            parameter.grad = None
        store_parameters_in_fp32(parameter for _, parameter in named)
        self._parts.append(self._prepare(named))
        return [(name, self._parts[-1].parameters.named[name]) for name, _ in named]

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        stepped = {
            name: tensor for part in self._parts for name, tensor in part.parameters.named.items()
        }
        return [(name, stepped[name]) for name in self._shapes]

    def build_optimizer(
        self, factory: OptimizerFactory, parameters: Sequence[tuple[str, Tensor]]
    ) -> torch.optim.Optimizer:
        if not self._parts[0].buckets.sharded:
            return factory(parameters)
        # Imported here: most runs have no use for it.
        from distmp.optim.sharded import build_on_shares

        return build_on_shares(factory, parameters, self._shapes)

    def begin_step(self) -> None:
        for part in self._parts:
            part.buckets.begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        for part in self._parts:
            part.buckets.begin_microbatch(last=last)

    def end_microbatch(self) -> Tensor | None:
        finite = [part.buckets.microbatch_is_finite() for part in self._parts]
        flags = [flag for flag in finite if flag is not None]
        kept = torch.stack(flags).all() if flags else None
        for part in self._parts:
            part.buckets.end_microbatch(kept)
        return kept

    def finish_gradients(self) -> None:
        for part in self._parts:
            part.buckets.finish()

    def gradients(self) -> list[GradientPart]:
        if self._parts[0].buckets.sharded:
            return [GradientPart(self.gradient_shards(), replicas=1)]
        buffers = [buffer for part in self._parts for buffer in part.buckets.buffers]
        return [GradientPart(buffers, replicas=self._world.world_size)]

    def gradient_shards(self) -> list[Tensor]:
        return [shard for part in self._parts for shard in part.buckets.shards]

    def publish_parameters(self) -> None:
        for part in self._parts:
            part.parameters.publish()

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        for part in self._parts:
            share = part.parameters.shares.get(name)
            if share is not None and tensor.shape == (share.stop - share.start,):
                return FlatSlice.of(tensor, self._shapes[name], share.start)
        return tensor
