"""Fully sharded data parallelism through FSDP2 (`fsdp`, and `hsdp` with several copies).

FSDP2 gathers parameters and reduces gradients. This module configures it so that the arithmetic is
that of every other strategy: gradients are summed (not averaged) over ranks and accumulated in
FP32.
"""

# Note [Accumulation and reduction with FSDP2]
#
# FSDP2 reduces a parameter group at the end of the group's backward. `accumulation.place`
# determines what happens before the last microbatch:
#
# - "sharded": Every microbatch is reduced. FSDP adds the result to the `.grad` of the shards.
# - "unsharded": `set_requires_gradient_sync(False)` skips the reduction. Autograd accumulates into
#   the `.grad` of the gathered parameters, which exists while the parameters themselves are freed.
# - "hybrid": `set_requires_all_reduce(False)` skips the all-reduce over the copies of the model.
#   FSDP adds the result of the reduce-scatter to a partial sum of the group. The `.grad` of the
#   shards is set in the last microbatch only.
#
# Sums over microbatches and over the uses of a weight have to be FP32, and FSDP fails if the
# dtypes of a group's gradients differ, as they would for a parameter that is first used in the
# last microbatch. So autograd makes all gradients FP32 (`accumulate_in_fp32`). It makes none FP32
# in a group of 16-bit weights that the loss uses exactly once: FSDP converts these when it copies
# them to the input of the reduction or adds them (`unconverted_gradients`). Only `ReduceScatter`
# rounds: once to the communication dtype, and it sums over ranks in FP32. With a 16-bit
# `reduce_dtype` in FSDP's policy, the backend would sum in 16 bits. So FSDP's policy is always
# FP32, and `ReduceScatter` knows the communication dtype.
#
# FSDP calls our collectives on its own CUDA streams, and `ReduceScatter` waits there, so it does
# not hold up backward. Its temporary buffers belong to FSDP's reduce-scatter stream, so their
# memory is reused in the order of that stream. FSDP keeps the input alive until the stream has
# read it. On CPUs the collective has finished when the call returns, so `ReduceScatter` frees the
# input at once.

# Note [Order of FSDP2 collectives]
#
# FSDP gathers a group before its forward. In backward it gathers the next group ahead of time
# (prefetch), in the reverse order of the last forward. The order of collectives on a rank therefore
# follows from the modules that this rank has run, and collectives of different ranks are matched by
# order alone. `AllGather` and `ReduceScatter` report each collective to `CollectiveOrder` before
# it starts, so ranks that differ raise an error instead of mixing parameters. A parameter without a
# gradient on this rank counts as zero in the reduction of its group (`watch_reductions`).
#
# After forward, the parameters of the root stay gathered, and those of blocks too if
# `reshard_after_forward` is false. FSDP frees them in backward. After a forward without backward
# they would remain, and the next forward would use them without a new gather: with old values,
# after an update or after loading a checkpoint. `_end_forward` therefore frees them.

# Note [Abandoned steps with FSDP2]
#
# If forward or backward raises an exception, the step leaves gathered parameters in the model,
# collectives in flight and gradients in four places: the `.grad` of shards, the `.grad` of gathered
# parameters, FSDP's accumulator and the partial sums of "hybrid". `zero_grad` clears the
# first only, and `reset_iter_state` (torch 2.13) only the partial sums, so a NaN of the abandoned
# step would reach the next one. `_unfinished` is set from the first microbatch until the gradients
# are final. If it is still set in `begin_step`, `_discard` resets FSDP's state, which waits for
# collectives in flight (torch 2.13), frees the gathered parameters, clears all these gradients and
# makes `CollectiveOrder` discard the pass.

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distmp.buckets.parameters import WATCHED_STEPS
from distmp.buckets.used_parameters import UsedParameters
from distmp.distributed.world import World
from distmp.errors import ConfigError, TrainingError
from distmp.optim.owners import ShardedMatrix
from distmp.parallel import fsdp_internals, fsdp_setup, strategy
from distmp.parallel.collective_order import END_OF_FORWARD, CollectiveOrder
from distmp.parallel.fsdp_collectives import AllGather, ReduceScatter
from distmp.parallel.materialize import InitialValues, materialize, materialize_shards
from distmp.parallel.settings import ParallelConfig
from distmp.precision.builders import cast_inputs_and_outputs
from distmp.precision.keep import cast_buffers, keep_in_fp32, refuse_pickling, with_submodules
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling.step_decision import GradientPart
from distmp.utils.dtypes import is_dtensor
from distmp.utils.tensor_trees import parameter_name

# Number of first forward passes that check for replaced parameters, which costs host time.
_WATCHED_FORWARDS = 16

WRITTEN_IN_FORWARD = (
    "was written to in forward (for example by an embedding with max_norm), where FSDP gathers a "
    "copy, so the new value would be lost; hold it in a buffer, or change engine.weights() between "
    "steps"
)
REPLACED = (
    "was replaced by .data =, which FSDP does not see; write to it in place (.copy_, .clamp_), or "
    "use engine.load_state_dict"
)


def _refuse_direct_use(name: str, gradient: Tensor) -> NoReturn:
    """Hook of a shard, which autograd calls only if the loss used the shard directly.

    FSDP reduces gradients of gathered parameters; this gradient would differ between ranks.
    """
    raise ConfigError("model", name, strategy.USED_DIRECTLY)


class FullySharded(strategy.Strategy):
    """Every rank holds a shard of each parameter, its gradient and its optimizer state.

    With `hsdp` the `sharding.shard_size` ranks of a shard group share one copy of the model, and
    every shard group has a copy.

    FSDP sets zero gradients for a parameter that no rank has used, if its group was reduced at all.
    `UsedParameters` determines which of these the optimizer updates.

    All ranks have to run the same modules in every microbatch. `CollectiveOrder` raises an error if
    they do not.

    Args:
        module: The model; it gets the values of rank 0 and is sharded in place, one group per
            block. Parameters on the meta device are computed one at a time.
        policy: The precision policy; gathered parameters have its compute dtype.
        world: The ranks to shard over.
        config: Settings of sharding.
        name: "fsdp" or "hsdp".
        values: The initial values of parameters and buffers that are on the meta device.

    Attributes:
        accumulation: Where gradients of microbatches are accumulated, and why.
    """

    _order: CollectiveOrder

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        world: World,
        config: ParallelConfig,
        name: str,
        values: InitialValues,
    ) -> None:
        fsdp_setup.check_shapes(module, name)
        shards = (
            fsdp_setup.shard_size(config.sharding, world) if name == "hsdp" else world.world_size
        )
        self._replicas = world.world_size // shards
        materialize(module, values, world.device, parameters=False)
        self.module = module
        strategy.move_to(module, world.device)
        strategy.make_contiguous(module.parameters())
        strategy.store_parameters(module)
        strategy.broadcast_from_rank_zero(module, world)
        cast_buffers(module, policy)
        kept = [*keep_in_fp32(module, policy, world.device.type).values()]
        for part in kept:
            part.float()  # frozen parameters may have 16 bits
        strategy.store_parameters(module, policy.param_dtype, except_for=kept)
        mesh = fsdp_setup.device_mesh(world, shards, name)
        self._shard_group = mesh.get_group("shard")
        ties = fsdp_setup.tied_names(module)
        fsdp_setup.shard(module, policy, kept, mesh, config.sharding)
        fsdp_setup.check_ties(module, ties, name)
        materialize_shards(module, values, world.device)
        self._root = cast(FSDPModule, module)
        vars(module)["__reduce_ex__"] = refuse_pickling  # pickle cannot find FSDP's class
        self._order = self._watch_collectives(world, policy, kept)
        fsdp_internals.check(self.module)
        fsdp_internals.accumulate_in_fp32(self.module)
        self._sixteen_bit = fsdp_internals.sixteen_bit_groups(self.module)
        cast_inputs_and_outputs(module, policy)
        self._track_parameters(world)
        self._known = strategy.KnownParameters(module)
        self.accumulation = fsdp_setup.choose(
            config.sharding.accumulate,
            policy,
            elements=sum(parameter.numel() for _, parameter in self._trainable),
            free_bytes=fsdp_setup.least_free_bytes(world),
            replicas=self._replicas,
            microbatches=config.microbatches,
        )
        self.reason = f"gradients {self.accumulation.place}: {self.accumulation.reason}"
        if name == "hsdp":
            self.reason = f"replicas x ranks: {self._replicas} x {shards}; {self.reason}"
        # Number of remaining steps that check for writes to gathered parameters.
        self._watched_steps = 0
        # Whether FSDP may hold gradients or parameters of an unfinished step.
        self._unfinished = False
        self._last_microbatch = True
        # Number of forward passes in this microbatch.
        self._forwards = 0

    def check_model(self) -> None:
        if not self._unfinished:  # a failed step may have left gathered parameters in the model
            self._reshard()  # and so may a forward outside of the engine
            self._known.check(self.module)

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._trainable)

    def begin_step(self) -> None:
        if self._unfinished:
            self._discard()
        self.used.begin_step()
        self._accumulated.clear()
        for (name, parameter), storage in zip(self._trainable, self._storages, strict=True):
            if len(parameter._backward_hooks or {}) > 1:  # one is `_refuse_direct_use`
                raise ConfigError("model", name, fsdp_setup.HOOK)
            is_replaced = parameter.untyped_storage()._cdata != storage._cdata
            if is_replaced and is_dtensor(parameter):
                raise ConfigError("model", name, REPLACED)
            parameter.grad = None

    def begin_microbatch(self, *, last: bool) -> None:
        self._unfinished = True
        self._last_microbatch = last
        self._forwards = 0
        if self.accumulation.place == "unsharded":
            self._root.set_requires_gradient_sync(last)
        elif self.accumulation.place == "hybrid":
            self._root.set_requires_all_reduce(last)

    def backward_context(self, loss: Tensor) -> AbstractContextManager[None]:
        return fsdp_internals.unconverted_gradients(self._sixteen_bit, loss)

    def finish_gradients(self) -> None:
        # FSDP waits for its reductions at the end of each backward.
        self.used.exchange_flags()
        unused = self.used.unused_in_step
        for name, parameter in self._trainable:
            if parameter.requires_grad:  # FSDP also reduces parameters that were frozen later
                self._check_gradient(parameter)
            if name in unused or not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._accumulated.clear()
        self._order.end()
        self._unfinished = False
        if self._watched_steps:
            self._watched_steps -= 1
            if written := fsdp_internals.written_parameter(self.module):
                raise ConfigError("model", parameter_name(written), WRITTEN_IN_FORWARD)

    def watch_copies(self) -> None:
        self._watched_steps = WATCHED_STEPS

    @torch.no_grad()  # otherwise `to_local` adds a node of autograd
    def gradients(self) -> list[GradientPart]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for _, parameter in self._trainable:
            if parameter.grad is not None:
                shard = cast(DTensor, parameter.grad).to_local()
                if shard.numel():  # a rank may hold no row of a parameter
                    by_dtype.setdefault(shard.dtype, []).append(shard)
        return [GradientPart(shards, self._replicas) for shards in by_dtype.values()]

    def gradient_memory(self) -> dict[str, list[Tensor]]:
        reduced = [tensor for part in self.gradients() for tensor in part.tensors]
        unreduced = fsdp_internals.unreduced_gradients(self.module)
        return {"partial sums of microbatches": [], "FP32 gradients": [*reduced, *unreduced]}

    def publish_weights(self) -> None:
        """Let the next forward gather the shards again; one outside of a step did not free them."""
        self._reshard()

    def sharded_matrix(self, name: str) -> ShardedMatrix | None:
        shape = dict(self._trainable)[name].shape
        ranks = self._shard_group.size()
        rows = -(-shape[0] // ranks)  # as `torch.chunk` divides them
        bounds = [min(rank * rows, shape[0]) * shape[1:].numel() for rank in range(ranks + 1)]
        return ShardedMatrix(shape, bounds)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return self._shard_group

    def units(self) -> list[tuple[str, nn.Module]]:
        parts: Iterator[tuple[str, nn.Module]] = self.module.named_modules()
        return [(name, part) for name, part in parts if isinstance(part, FSDPModule)]

    def _track_parameters(self, world: World) -> None:
        """Track the parameters that require gradients now."""
        self._trainable = named = strategy.trainable(self.module)
        # Of the DTensor, not of its shard. Kept, so that no other storage gets the same address.
        self._storages = [parameter.untyped_storage() for _, parameter in named]
        self._names = {id(parameter): name for name, parameter in named}
        self.used = UsedParameters([name for name, _ in named], world.group, world.device)
        # The gradients of this step by the `id` of their parameters, and their versions.
        self._accumulated: dict[int, tuple[Tensor, int]] = {}
        for name, parameter in named:
            parameter.register_hook(functools.partial(_refuse_direct_use, name))

    def _mark_used(self, parameter: nn.Parameter) -> None:
        """Record that backward computed a gradient of a parameter on this rank."""
        name = self._names.get(id(parameter))
        if name is not None:
            self.used.mark_used(name)

    def _record_gradient(self, parameter: nn.Parameter) -> None:
        """Record the gradient that FSDP has set, whose memory only FSDP may change in this step."""
        gradient = parameter.grad
        if gradient is None:
            self._refuse_lost_gradient(parameter)
        self._accumulated[id(parameter)] = (gradient, gradient._version)

    def _check_gradient(self, parameter: nn.Parameter) -> None:
        """Refuse a gradient that other code has set, removed or written to in this step.

        FSDP2 adds to the memory of a shard without a new version of the DTensor.

        Raises:
            TrainingError: Naming the parameter.
        """
        if not self._unfinished:
            return  # in a step of another engine
        gradient, version = self._accumulated.get(id(parameter), (None, 0))
        is_same = parameter.grad is gradient
        if not is_same or (gradient is not None and gradient._version != version):
            self._refuse_lost_gradient(parameter)

    def _refuse_lost_gradient(self, parameter: nn.Parameter) -> NoReturn:
        raise TrainingError(
            f"the loss function or a hook has cleared or changed the gradient of "
            f"{self._names[id(parameter)]!r} before the end of the step, so the sum over "
            "microbatches would be lost; leave out zero_grad, which engine.step calls, and hooks "
            "that set .grad"
        )

    def _watch_collectives(
        self, world: World, policy: PrecisionPolicy, kept: Sequence[nn.Module]
    ) -> CollectiveOrder:
        """Replace FSDP's collectives by ours, which sum in FP32 and compare their order."""
        self._units = units = self.units()
        order = CollectiveOrder(world, [name for name, _ in units])
        in_fp32 = with_submodules(kept)
        for index, (_, part) in enumerate(units):
            unit = cast(FSDPModule, part)
            comm_dtype = torch.float32 if id(part) in in_fp32 else policy.reduce_dtype
            # Any, because torch does not export the abstract base classes.
            gather: Any = AllGather(order, index)
            reduce: Any = ReduceScatter(
                order, index, comm_dtype, self._shard_group, world.device, copies=self._replicas
            )
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)
            # This setting is not recursive.
            unit.set_gradient_divide_factor(1.0)
            # Otherwise FSDP applies the factor by a reduction operator that gloo does not support.
            unit.set_force_sum_reduction_for_comms(True)
        fsdp_internals.watch_reductions(
            self.module, self._mark_used, self._check_gradient, self._record_gradient
        )
        self._watched_forwards = _WATCHED_FORWARDS
        self.module.register_forward_pre_hook(
            torch.compiler.disable(self._begin_forward), prepend=True
        )
        self.module.register_forward_hook(torch.compiler.disable(self._end_forward))
        return order

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if self._watched_forwards:
            self._watched_forwards -= 1
            fsdp_internals.refuse_replaced_parameters(module)
        if torch.is_grad_enabled():
            self._forwards += 1
            self._order.begin((self._forwards, self._last_microbatch))
        else:
            self._order.begin("evaluation")

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._order.note(END_OF_FORWARD)
        if not torch.is_grad_enabled():
            # There is no backward to do it, see Note [Order of FSDP2 collectives].
            self._reshard()

    def _reshard(self) -> None:
        for _, part in self._units:
            cast(FSDPModule, part).reshard()

    def _discard(self) -> None:
        """Clear the state of an abandoned step, see Note [Abandoned steps with FSDP2]."""
        if hasattr(self._root, "reset_iter_state"):  # torch 2.13
            self._root.reset_iter_state()
        self._reshard()
        fsdp_internals.discard_gradients(self.module)
        self._order.abandon()
        self._unfinished = False
