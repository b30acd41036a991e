"""Accumulates gradients in FP32 and reduces them over ranks, for replicated parameters."""

# Note [Gradient hooks and the lifetime of .grad]
#
# Autograd calls the post-accumulate-grad hook of a parameter after it has summed all uses of the
# parameter in a backward and written the sum to `.grad`. `grad_dtype` is FP32, so this sum is FP32
# too:
#
# - `.grad` is None except in a backward. So user code that runs between backward passes, such as
#   `zero_grad(set_to_none=False)` in the loss function, cannot change the sums in the buckets, and
#   an optimizer that steps before `finish` does not see gradients that are not reduced.
#   `begin_step` clears `.grad`, which is a view of the bucket after a step.
# - Our hook copies the first gradient of a step into the bucket, so that no pass over memory is
#   needed to zero a bucket, except for parameters without a gradient (`_zero_missing`). It adds
#   later ones, and sets `.grad` to None. On a GPU, the gradients of up to `HELD_BYTES` are held and
#   copied in one launch, at the latest when the bucket is reduced or backward ends. Hooks run on
#   the stream of the forward. If there are several, each copies its gradients, and the stream that
#   reduces a bucket waits for all of them.
# - `backward_context` saves these additions: it sets `.grad` to the view of the bucket, and
#   autograd adds the next gradient to it, in place. The hook finds the view in `.grad` and returns.
#   If microbatches are summed separately, there is no sum to add to.
# - On a CPU, a copy by the hook takes longer than to zero a small view. `begin_step` zeroes these,
#   and autograd adds the first gradient, too.
# - If `backward_context` gets the loss, it sets `grad_dtype` to None for 16-bit parameters that
#   it uses once: autograd then makes no FP32 copy of their gradients, see Note [16-bit gradients
#   and several uses of a weight].
# - A parameter with other post-accumulate hooks does not get the view, because they may scale or
#   replace `.grad`: they would change the sum instead of the gradient of one microbatch. For such
#   a parameter, and for one with tensor hooks, the gradient is converted, so that all hooks see
#   FP32.
# - Outside of the buckets, the FP32 gradients of all parameters never exist at the same time.
#
# Hooks of a parameter run in the order of a dictionary, and `begin_step` moves ours to its end. So
# every other post-accumulate hook sees the gradient of one microbatch. No hook sees reduced
# gradients: they are in `.grad` from `finish` to the next `begin_step`.
#
# Other code must not set `.grad` in a step: autograd would add the next gradient to it, and we
# cannot tell a sum from a gradient. So `backward_context` and `finish` refuse it.
#
# A backward with `create_graph=True` does not add in place, and the buckets hold no graph. The hook
# refuses it. In every other backward gradients are disabled, so the hook may write to buckets.
#
# With reentrant checkpointing a shared parameter gets several gradients, and so several hook calls,
# in one backward. That is correct until the reduction of the bucket starts. A gradient that arrives
# afterwards cannot be part of the sum, so the hook raises an error.
#
# The hook refers to the buckets by a weak reference, because the parameter holds the hook and the
# buckets hold the parameter. Buckets that are no longer used are freed, and their hooks do nothing.

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.buckets.layout import (
    ALIGNMENT,
    DEFAULT_BUCKET_BYTES,
    SUMMED_DTYPES,
    check_parameters,
    plan_buckets,
    refuse_changed,
)
from distmp.buckets.partial_sums import FlatGradients, PartialSums
from distmp.buckets.reduction import AllReduce, AllToAllReduce, Reduction
from distmp.buckets.used_parameters import UsedParameters, weights_used_once
from distmp.distributed.collectives import exchange_groups, has_native_reduce_scatter
from distmp.distributed.comparison import check_same, describe_parameters
from distmp.distributed.failing_together import explain_lost_peers
from distmp.errors import ConfigError, TrainingError, require
from distmp.scaling.norms import CHUNK, chunk_norms
from distmp.utils.autograd import other_parameters
from distmp.utils.tensor_trees import version_counters

# Largest number of elements of a gradient that is added to zeros instead of being copied.
SMALL_ELEMENTS = 2**13
REPLACED = (
    "{!r}.grad was set in a step by other code (loss function, hook, DistributedDataParallel, a "
    "backward between microbatches), so gradients would be lost or counted twice; call "
    "begin_microbatch() before backward, leave the module unwrapped, return the gradient "
    "from a hook of Tensor.register_hook, or change gradients after finish() (with an engine: "
    "engine.gradients() in a step pre-hook of the optimizer)"
)
OTHER_PARAMETER = (
    "is not used by the loss, which uses one of shape {} that is not in the buckets, so its "
    "gradient is not reduced; build the buckets after the last change of the model "
    "(load_state_dict(assign=True), weight_norm, a new layer), or freeze what you do not train"
)
NO_TARGET = (
    "leaves {!r} without a gradient, because a rank has only its shard of the sum; create "
    "distmp.buckets.FlatParameters(buckets, values) and let the optimizer update its `named`"
)
# Largest size of the gradients that wait to be copied in one launch, by device type.
HELD_BYTES = {"cuda": DEFAULT_BUCKET_BYTES}
MOVED = (
    "was converted or moved together with its gradient, for example by model.to(); convert or move "
    "the model before you build the engine, or build a new engine"
)


class _Stage(IntEnum):
    """The stages of a step, in order."""

    BETWEEN_STEPS = 0
    BEGUN = 1  # and between two microbatches
    MICROBATCH = 2
    LAST_MICROBATCH = 3
    ENDED = 4  # only `finish` is missing


@dataclass(eq=False)
class _Slot:
    """The position of a parameter in the buckets.

    Attributes:
        name: Name of the parameter in the model.
        parameter: The parameter that backward computes gradients of.
        strides: Its strides, those of its view of the bucket.
        bucket: Index of the bucket.
        index: Index of the parameter in `FlatGradients.views`.
        target: The tensor that the optimizer updates: the parameter, its FP32 master weight, or
            this rank's shard of one of them (1-dim).
        starts_at_zero: Whether the first gradient of a step is added to zeros.
        has_gradient: Whether the bucket holds a gradient of this parameter and step (of this
            microbatch if microbatches are summed separately).
        hook_id: Key of our post-accumulate hook.
        computed: Whether a backward has computed a gradient, if there are other hooks; see `_hook`.
        added_to: The view of the bucket that autograd adds the next gradient to, if it does.
    """

    name: str
    parameter: nn.Parameter
    bucket: int
    index: int
    starts_at_zero: bool
    has_gradient: bool = False
    hook_id: int = 0
    computed: list[bool] | None = None
    added_to: Tensor | None = None

    def __post_init__(self) -> None:
        self.strides = self.parameter.stride()
        self.target: Tensor = self.parameter


class Fp32GradBuckets:
    """Accumulates the gradients of all microbatches in flat FP32 buckets and sums them over ranks.

    The module needs no wrapper. A hook on each parameter takes its gradient as soon as backward has
    computed it: the first microbatch of a step copies it into the bucket, later ones add to it, and
    it is freed at once. Between backward passes, `.grad` is None. Several uses of one weight in a
    backward are summed in FP32 too, even if the parameter has 16 bits (`Tensor.grad_dtype`). But
    autograd sums the gradients of what is computed from a weight once (`weight.t()`) in its dtype,
    and so does a compiled block with all uses of a weight in the block.

    During the last backward a bucket is reduced (SUM) as soon as it has the gradients of all its
    parameters, while backward continues. Every rank starts the reductions in the same order,
    independent of the order in which gradients arrive: in the order of the buckets (reverse
    registration) in the first step, then in the order that rank 0 observed in the first step. A
    parameter without a gradient counts as zero, unless no rank has ever had one: then its `.grad`
    is None, as in plain torch. As long as there is such a parameter, every step exchanges a flag
    for it and the host waits for the result (`UsedParameters`).

    A step is `begin_step`; for each microbatch `begin_microbatch`, forward, one backward in
    `backward_context`, and `end_microbatch`; then `finish`. Afterwards the `.grad` of every
    parameter (or of the tensor that `attach` assigned) is a view of a bucket. If the optimizer
    skips the step, call `end_step`.

    Args:
        named_parameters: Trainable parameters with their names, in order of registration, the same
            on all ranks. A parameter that is frozen later has no gradient while it is frozen.
        group: Ranks to reduce over; None for a single process, which reduces nothing. Several
            objects need a group each, or the order of their reductions would depend on timing.
        bucket_bytes: A bucket is closed once it has this many bytes; None takes 25 MiB, on CPUs
            6 MiB.
        reduce_dtype: Communication dtype: float32, or bfloat16 or float16 by all-to-all, summed in
            FP32 in a fixed order, so that each value is rounded once before the sum. Over several
            machines the sum of each machine is rounded once, too.
        shard: Reduce-scatter: only this rank's shard of each bucket is summed. The optimizer then
            updates `FlatParameters(...).named`, or other tensors passed to `attach`.
        reproducible: Compute the same bits for every distribution of the microbatches of the global
            batch over ranks: they are the leaves of one binary tree, in rank order. The numbers of
            ranks and of microbatches have to be powers of two. Needs memory for log2(microbatches)
            more sets of buckets.
        drop_non_finite: Hold every microbatch separately until `microbatch_is_finite` has returned
            whether to drop it. Needs memory for one more set of buckets, and disables overlap.

    Attributes:
        layouts: The parameters of each bucket and their offsets.
        buffers: After `finish`: the flat FP32 buckets, each of shape (size of the layout,).
        used: Tracks which parameters have ever had a gradient.
        checks_loss: Whether `backward_context` refuses a loss of other parameters.

    Raises:
        ConfigError: If an argument is invalid or differs between ranks, or if `reproducible` does
            not work with the number of ranks or the reduce dtype.

    Example:
        >>> weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> buckets = Fp32GradBuckets([("weight", weight)], group=None)
        >>> buckets.begin_step()
        >>> for microbatch in range(300):
        ...     buckets.begin_microbatch(last=microbatch == 299)
        ...     with buckets.backward_context():
        ...         weight.sum().backward()
        ...     buckets.end_microbatch()
        >>> buckets.finish()
        >>> weight.grad  # a sum in bfloat16 would have stopped at 256
        tensor([300., 300., 300.])
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        bucket_bytes: int | None = None,
        *,
        reduce_dtype: torch.dtype = torch.float32,
        shard: bool = False,
        reproducible: bool = False,
        drop_non_finite: bool = False,
    ) -> None:
        options: dict[str, Any] = {
            "shard": shard,
            "reproducible": reproducible,
            "drop_non_finite": drop_non_finite,
            "bucket_bytes": bucket_bytes,
            "reduce_dtype": reduce_dtype,
        }
        _check_options(**options)
        _check_group(group)
        named_parameters = check_parameters(named_parameters)
        described = {name: repr(value) for name, value in options.items()}
        device = named_parameters[0][1].device
        check_same(group, device, described | describe_parameters(named_parameters))
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.sharded = shard and self.world_size > 1
        if reproducible:
            _check_reproducible(self.world_size, reduce_dtype)
        self._reduction = self._build_reduction(device, reduce_dtype, pairwise=reproducible)
        # A plain all-reduce does not divide buckets among the ranks.
        is_plain = isinstance(self._reduction, AllReduce) and not self.sharded
        unit = (CHUNK if reproducible else ALIGNMENT) * (1 if is_plain else self.world_size)
        self.layouts = plan_buckets(named_parameters, bucket_bytes, unit)
        # The set of buffers that backward writes to, and the set that holds the result. They are
        # the same unless microbatches are summed separately.
        create = partial(
            FlatGradients, self.layouts, self.rank, self.world_size if self.sharded else 1
        )
        self._leaf = self._total = create()
        self._drop_non_finite = drop_non_finite
        separate = reproducible or drop_non_finite
        self._sums = PartialSums(create, pairwise=reproducible) if separate else None
        # Indices of the buckets in the order of their reductions, and in the order in which they
        # got complete in the first step (None afterwards).
        self._order = list(range(len(self.layouts)))
        self._observed: list[int] | None = []
        self._slots = list(self._make_slots())
        self._by_bucket: list[list[_Slot]] = [[] for _ in self.layouts]
        for slot in self._slots:
            self._by_bucket[slot.bucket].append(slot)
        self._starting_at_zero = list(self._zeroed_before_steps())
        # By stream that computes them: gradients that are not copied yet, with their views of the
        # bucket. All streams whose hooks the last copy did not wait for are keys.
        self._held: dict[torch.Stream | None, list[tuple[Tensor, Tensor]]] = {}
        self._held_bytes = 0
        self._most_held = HELD_BYTES.get(device.type, 0)
        self._gpu = device.index if device.type == "cuda" else None
        self._has_16_bit_parameters = any(
            parameter.dtype != torch.float32 for _, parameter in named_parameters
        )
        self.checks_loss = True
        self.used = UsedParameters([slot.name for slot in self._slots], group, device)
        # For each bucket, the parameters whose gradients have not arrived in the last microbatch.
        self._missing: list[set[_Slot]] = []
        # The first `_launched` buckets of `_order` are being reduced.
        self._launched = 0
        # Whether buckets are reduced in this microbatch as soon as they are complete.
        self._reduces = False
        self._stage = _Stage.BETWEEN_STEPS

    @property
    def buffers(self) -> list[Tensor]:
        """The flat FP32 buckets of the finished step; with `shard` only `shards` are defined."""
        return self._total.buffers

    @property
    def partial_sums(self) -> list[Tensor]:
        """Flat FP32 buffers besides `buffers`, if microbatches are summed separately."""
        if self._sums is None:
            return []
        held = [*self._leaf.buffers, *self._sums.buffers]
        return [buffer for buffer in held if not any(buffer is own for own in self.buffers)]

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shard of every bucket, with `shard` or `reproducible`: FP32, contiguous."""
        return [
            buffer[layout.shard(self.rank, self.world_size)]
            for layout, buffer in zip(self.layouts, self.buffers, strict=True)
        ]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter by name, as views of the finished buckets."""
        return {slot.name: self._total.views[slot.index] for slot in self._slots}

    def attach(self, bucket: int, index: int, target: Tensor) -> None:
        """Assign the gradient of a parameter to the tensor that the optimizer updates instead.

        Args:
            bucket: Index of the bucket.
            index: Index of the parameter within the bucket.
            target: FP32, in the parameter's shape; with `shard` this rank's elements of it, 1-dim.
        """
        self._by_bucket[bucket][index].target = target

    def begin_step(self) -> None:
        """Start from zero; the gradients of an unfinished step are discarded.

        A parameter that got another memory format, such as channels_last, gets its former one.

        Raises:
            TrainingError: If only `finish` is missing from the previous step.
        """
        if self._stage == _Stage.ENDED:
            raise TrainingError(
                "finish() was not called after the last microbatch, so the gradients would be "
                "lost; call it before the optimizer's step, or call discard() to drop the step"
            )
        self.discard()
        self._stage = _Stage.BEGUN
        self.used.begin_step()
        for slot in self._slots:
            slot.has_gradient = False
            slot.parameter.grad = slot.target.grad = None
            if slot.target is slot.parameter and slot.parameter.stride() != slot.strides:
                # torch's fused optimizers on CPU need the strides of the gradient.
                restored = slot.parameter.new_empty_strided(slot.parameter.shape, slot.strides)
                slot.parameter.data = restored.copy_(slot.parameter.data)
            if len(slot.parameter._post_accumulate_grad_hooks) > 1:
                _run_last(slot)
        if self._starting_at_zero:
            with torch.no_grad():
                torch._foreach_zero_(self._starting_at_zero)

    def begin_microbatch(self, *, last: bool) -> None:
        """Announce a backward; buckets are reduced during the one announced as `last`.

        Raises:
            TrainingError: Before `begin_step`, after a microbatch that did not end, or after one
                with `last=True`.
        """
        if self._stage != _Stage.BEGUN:
            missing = {_Stage.BETWEEN_STEPS: "begin_step()", _Stage.MICROBATCH: "end_microbatch()"}
            reason = f"without {missing.get(self._stage, 'finish() after one with last=True')}"
            raise TrainingError(
                f"begin_microbatch() was called {reason}; call begin_step(), also after an error, "
                "then begin_microbatch() and end_microbatch() for each microbatch, with last=True "
                "for the last one, then finish()"
            )
        self._stage = _Stage.LAST_MICROBATCH if last else _Stage.MICROBATCH
        self._launched = 0
        if self._sums is not None:
            for slot in self._slots:
                slot.has_gradient = False
        self._reduces = last and self._reduction is not None
        if self._reduces:
            self._missing = [
                {slot for slot in slots if slot.parameter.requires_grad}
                for slots in self._by_bucket
            ]

    @contextlib.contextmanager
    def backward_context(self, loss: Tensor | None = None) -> Iterator[None]:
        """Add gradients to the buckets with less memory traffic; enter it before backward.

        Autograd adds to the buckets in place. A backward outside of the context computes the same,
        but it takes longer, because the hooks of the parameters add the gradients.

        Args:
            loss: The tensor whose `backward` is called in the context. The gradient of a 16-bit
                parameter that the loss uses once is added without an FP32 copy: 10 instead of 18
                bytes are read and written per element. With None all gradients are copied to FP32,
                and parameters that have replaced those of the buckets are not noticed.

        Raises:
            TrainingError: If other code has set a `.grad`.
            ConfigError: In the first step, or after a backward that adds to no bucket: if the loss
                uses another parameter, of the same shape, in place of one of the buckets.
        """
        # In a microbatch, the parameters whose gradients no hook of the user reads.
        unhooked: list[_Slot] = []
        if self._stage >= _Stage.MICROBATCH:
            self._refuse_replaced()
            unhooked = [
                slot for slot in self._slots if len(slot.parameter._post_accumulate_grad_hooks) == 1
            ]
        added, unconverted = self._added_in_place(unhooked), self._unconverted(unhooked, loss)
        for slot in added:
            slot.parameter.grad = slot.added_to = self._leaf.views[slot.index]
        for parameter in unconverted:
            parameter.grad_dtype = None
        checked = loss if self.checks_loss and self._stage >= _Stage.MICROBATCH else None
        before = [] if checked is None else version_counters(self._leaf.buffers)
        try:
            yield
            self._copy_held()
            if checked is not None:
                self._refuse_others(checked, before)
        except BaseException:
            for slot in self._slots:
                slot.parameter.grad = None
            raise
        finally:
            for slot in added:
                if slot.parameter.grad is slot.added_to:
                    slot.parameter.grad = None
                slot.added_to = None
            for parameter in unconverted:
                parameter.grad_dtype = torch.float32

    @torch.no_grad()
    def microbatch_is_finite(self) -> Tensor | None:
        """Return whether all gradients of the last backward are finite.

        Returns:
            0-dim bool on the device with `drop_non_finite`, otherwise None.
        """
        if not self._drop_non_finite:
            return None
        self._copy_held()
        for bucket in range(len(self.layouts)):
            self._zero_missing(bucket)
        finite = [chunk_norms([buffer]).isfinite().all() for buffer in self._leaf.buffers]
        return torch.stack(finite).all()

    @torch.no_grad()
    def end_microbatch(self, kept: Tensor | None = None) -> None:
        """End a microbatch, after its backward.

        Args:
            kept: 0-dim bool, usually the result of `microbatch_is_finite`; if False the microbatch
                is dropped, and the caller has to drop its loss and weight. None keeps it.

        Raises:
            TrainingError: If `kept` is given without `drop_non_finite`.
        """
        if kept is not None and not self._drop_non_finite:
            raise TrainingError("end_microbatch(kept) needs Fp32GradBuckets(drop_non_finite=True)")
        self._copy_held()
        self.used.end_microbatch(kept)
        if kept is not None:
            for buffer in self._leaf.buffers:
                buffer.masked_fill_(~kept, 0.0)
        if self._stage == _Stage.LAST_MICROBATCH:
            self._stage = _Stage.ENDED
        elif self._stage == _Stage.MICROBATCH:
            self._stage = _Stage.BEGUN
            if self._sums is not None:
                for bucket in range(len(self.layouts)):
                    self._zero_missing(bucket)
                self._leaf = self._sums.add(self._leaf)

    @torch.no_grad()
    def finish(self) -> None:
        """Launch the remaining reductions, wait for all of them and set `.grad`.

        Raises:
            TrainingError: If no microbatch was announced as `last`.
            ConfigError: With `shard` on several ranks, for a parameter without `attach`.
            LostPeerError: If another rank has exited.
        """
        if self._stage < _Stage.LAST_MICROBATCH:
            raise TrainingError(
                "finish() was called before begin_microbatch(last=True); announce the last "
                "microbatch of a step with last=True"
            )
        self._refuse_replaced()
        with explain_lost_peers(self.group):
            self._launch_up_to(len(self.layouts))
            if self._reduction is not None:
                self._reduction.finish()
            self._stage = _Stage.BETWEEN_STEPS
            if self._sums is not None:
                self._total = self._sums.total_after(self._leaf)
            self._sync_order()
            self.used.exchange_flags()
        unused, total = self.used.unused_in_step, self._total
        for slot, view, updated in zip(self._slots, total.views, total.updated, strict=True):
            if slot.name in unused or not slot.parameter.requires_grad:
                slot.parameter.grad = slot.target.grad = None
            elif not self.sharded:
                slot.parameter.grad = slot.target.grad = view
            elif slot.target is not slot.parameter:
                slot.target.grad = updated
            else:
                raise ConfigError("shard", True, NO_TARGET.format(slot.name))

    def check_storage(self) -> None:
        """Refuse gradients that are no longer in the buckets.

        Raises:
            ConfigError: Naming the first parameter whose gradient was converted or moved.
        """
        names, total = (slot.name for slot in self._slots), self._total
        refuse_changed(names, total.current_addresses(), total.addresses, MOVED)

    def end_step(self, skipped: Tensor) -> None:
        """Record whether the optimizer skipped the step; without a call it did not.

        Args:
            skipped: 0-dim, nonzero if the step was skipped; the same on all ranks.
        """
        self.used.end_step(skipped)

    @torch.no_grad()
    def discard(self) -> None:
        """Drop the gradients of an unfinished step; no effect after a finished one.

        If the last microbatch was announced, other ranks may have started reductions, so this rank
        runs its remaining ones. All ranks have to call the same one, `finish` or `discard`.
        """
        if self._stage >= _Stage.LAST_MICROBATCH and self._reduction is not None:
            for bucket in self._order[self._launched :]:
                self._reduction.launch(self._leaf.buffers[bucket])
            self._reduction.finish()
        self._stage = _Stage.BETWEEN_STEPS
        self._held, self._held_bytes = {}, 0
        if self._sums is not None:
            self._sums.clear()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: a copy would have the hooks of no parameter.

        Raises:
            TrainingError: Always.
        """
        raise TrainingError("buckets cannot be copied or pickled; build others on another model")

    # The hooks

    def _make_slots(self) -> Iterator[_Slot]:
        index = itertools.count()
        for bucket, layout in enumerate(self.layouts):
            for name, parameter in zip(layout.names, layout.parameters, strict=True):
                parameter.grad_dtype = torch.float32
                # On a GPU, one launch copies many gradients, and each addition is a launch.
                small = layout.device.type == "cpu" and parameter.numel() <= SMALL_ELEMENTS
                added = small and self._sums is None
                slot = _Slot(name, parameter, bucket, next(index), starts_at_zero=added)
                hook = _hook(weakref.ref(self), weakref.ref(slot))
                slot.hook_id = parameter.register_post_accumulate_grad_hook(hook).id
                yield slot

    def _zeroed_before_steps(self) -> Iterator[Tensor]:
        for buffer, slots in zip(self._leaf.buffers, self._by_bucket, strict=True):
            small = [self._leaf.views[slot.index] for slot in slots if slot.starts_at_zero]
            yield from [buffer] if len(small) == len(slots) else small

    def _refuse_replaced(self) -> None:
        """Refuse a `.grad` that other code has set; between backward passes it is None."""
        for slot in self._slots:
            if slot.parameter.grad is not None:
                raise TrainingError(REPLACED.format(slot.name))

    def _refuse_others(self, loss: Tensor, versions: list[int]) -> None:
        """Refuse a loss of parameters that have replaced those of the buckets in the model."""
        if self._observed is None and version_counters(self._leaf.buffers) != versions:
            return  # not the first step, and its backward has added to the buckets
        # A replacement has the shape of what it replaces, unlike most other parameters of a loss.
        unused = {
            tuple(slot.parameter.shape): slot.name
            for slot in reversed(self._slots)
            if slot.parameter.requires_grad and not slot.has_gradient
        }
        own = {slot.parameter for slot in self._slots}
        for parameter in other_parameters(loss, own) if unused else ():
            if name := unused.get(shape := tuple(parameter.shape)):
                raise ConfigError("named_parameters", name, OTHER_PARAMETER.format(shape))

    def _added_in_place(self, unhooked: list[_Slot]) -> list[_Slot]:
        """Return the parameters whose next gradient autograd adds to their view of the bucket."""
        if self._sums is not None:
            return []
        # A hook also runs if a function returns no gradient, which does not count as use.
        unknown = self.used.not_known_as_used
        return [
            slot
            for slot in unhooked
            if slot.has_gradient or (slot.starts_at_zero and slot.name not in unknown)
        ]

    def _unconverted(self, unhooked: list[_Slot], loss: Tensor | None) -> list[nn.Parameter]:
        """Return the 16-bit parameters whose next gradient needs no FP32 copy."""
        if not self._has_16_bit_parameters or loss is None:
            return []
        used_once = weights_used_once(loss)
        parameters = [slot.parameter for slot in unhooked if id(slot.parameter) in used_once]
        return [parameter for parameter in parameters if not parameter._backward_hooks]

    def _take_gradient(self, slot: _Slot, gradient: Tensor) -> None:
        """Add the gradient of a parameter to its bucket."""
        self.used.mark_used(slot.name)
        if torch.is_grad_enabled():
            raise TrainingError(
                f"backward(create_graph=True) computed the gradient of {slot.name!r}, and buckets "
                "hold no graph; call backward() without it, and use torch.autograd.grad for "
                "derivatives of gradients"
            )
        if slot.added_to is not None:  # autograd would have added to it
            raise TrainingError(REPLACED.format(slot.name))
        view = self._leaf.views[slot.index]
        if gradient.layout is not torch.strided:
            gradient = gradient.float().to_dense()  # sums values of the same index
        if slot.has_gradient or slot.starts_at_zero:
            self._copy_held()
            view += gradient
        else:
            self._held_on_stream().append((view, gradient))
            self._held_bytes += view.nbytes
            if self._held_bytes > self._most_held:
                self._copy_held()
        slot.has_gradient = True
        slot.parameter.grad = None
        if self._reduces:
            self._mark_ready(slot)

    def _held_on_stream(self) -> list[tuple[Tensor, Tensor]]:
        return self._held.setdefault(self._stream(), [])

    def _stream(self) -> torch.Stream | None:
        return None if self._gpu is None else torch.accelerator.current_stream(self._gpu)

    def _copy_held(self) -> None:
        """Copy gradients on the streams that compute them, and let the current stream wait."""
        current = self._stream()
        for stream, held in self._held.items():
            if held:
                views, gradients = zip(*held, strict=True)
                with stream or contextlib.nullcontext():
                    torch._foreach_copy_(views, gradients)
            if current is not None and stream not in (None, current):
                current.wait_stream(stream)
        self._held, self._held_bytes = {current: []}, 0

    def _mark_ready(self, slot: _Slot) -> None:
        """Launch the reductions of all buckets that are complete and next in order."""
        missing = self._missing[slot.bucket]
        if not missing and slot.bucket in self._order[: self._launched]:
            raise TrainingError(
                f"the gradient of {slot.name!r} arrived a second time in the last microbatch, "
                "after its bucket was reduced: call backward once for each microbatch, and use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        missing.discard(slot)
        if missing or self._drop_non_finite:
            return
        if self._observed is not None and slot.bucket not in self._observed:
            self._observed.append(slot.bucket)
        ready = self._launched
        while ready < len(self._order) and not self._missing[self._order[ready]]:
            ready += 1
        self._launch_up_to(ready)

    # Sums over microbatches and ranks

    def _launch_up_to(self, end: int) -> None:
        self._copy_held()
        for bucket in self._order[self._launched : end]:
            # Count it first: from now on, a gradient for this bucket is an error.
            self._launched += 1
            self._zero_missing(bucket)
            total = self._leaf.buffers[bucket]
            if self._sums is not None:
                total = self._sums.add_last(self._leaf, bucket)
            if self._reduction is not None:
                self._reduction.launch(total)

    def _zero_missing(self, bucket: int) -> None:
        missing = [
            self._leaf.views[slot.index]
            for slot in self._by_bucket[bucket]
            if not (slot.has_gradient or slot.starts_at_zero)
        ]
        if missing:
            torch._foreach_zero_(missing)

    def _build_reduction(
        self, device: torch.device, comm_dtype: torch.dtype, *, pairwise: bool
    ) -> Reduction | None:
        if self.group is None:
            return None
        copies = self.sharded and not has_native_reduce_scatter(device)
        if comm_dtype == torch.float32 and not pairwise and not copies:
            return AllReduce(self.group, shard=self.sharded)
        return AllToAllReduce(
            self.group,
            shard=self.sharded,
            comm_dtype=comm_dtype,
            pairwise=pairwise,
            groups=exchange_groups(self.group, device),
        )

    def _sync_order(self) -> None:
        """After the first step, set the order of reductions to the one that rank 0 observed."""
        observed, self._observed = self._observed, None
        if observed is None or self.group is None:
            return
        order = [*observed, *(b for b in self._order if b not in observed)]
        common = torch.tensor(order, dtype=torch.int64, device=self.layouts[0].device)
        dist.broadcast(common, dist.get_global_rank(self.group, 0), self.group)
        self._order = common.tolist()


def _run_last(slot: _Slot) -> None:
    """Let our hook run after other post-accumulate hooks, and record what it then cannot see."""
    hooks = slot.parameter._post_accumulate_grad_hooks
    hooks[slot.hook_id] = hooks.pop(slot.hook_id)
    if slot.computed is None:
        slot.computed = []
        slot.parameter.register_hook(partial(_record, slot.computed))


def _hook(
    buckets: weakref.ref[Fp32GradBuckets], slot_of: weakref.ref[_Slot]
) -> Callable[[Tensor], None]:
    """Return the hook of a parameter, see Note [Gradient hooks and the lifetime of .grad].

    Args:
        buckets: The buckets.
        slot_of: The position of the parameter in the buckets.
    """

    def take_gradient(_: Tensor) -> None:  # what a hook before this one has returned, if any
        alive, slot = buckets(), slot_of()
        # Ignore a backward outside of a microbatch, as of another engine on the same model. Within
        # a step, `_refuse_replaced` finds its gradient.
        if alive is None or slot is None or alive._stage < _Stage.MICROBATCH:
            return
        gradient = slot.parameter.grad
        if gradient is None:  # backward has computed none, or another hook has removed it
            if slot.computed == [True]:
                raise TrainingError(
                    f"a hook has set the gradient of {slot.name!r} to None in a backward, so it "
                    "would be lost; remove the hook, which was registered by "
                    "register_post_accumulate_grad_hook"
                )
        elif gradient is not slot.added_to:
            alive._take_gradient(slot, gradient)
        elif alive._reduces:
            alive._held_on_stream()  # the copy waits for what autograd has added there
            alive._mark_ready(slot)

    return take_gradient


def _record(computed: list[bool], gradient: Tensor | None) -> None:
    computed[:] = [gradient is not None]


def _check_options(bucket_bytes: Any, reduce_dtype: object, **switches: object) -> None:
    for name, value in switches.items():
        require(isinstance(value, bool), name, value, "must be True or False")
    valid = bucket_bytes is None or (type(bucket_bytes) is int and bucket_bytes > 0)
    require(valid, "bucket_bytes", bucket_bytes, "use an integer above 0, or None")
    problem = "use torch.float32, torch.bfloat16 or torch.float16"
    require(reduce_dtype in SUMMED_DTYPES, "reduce_dtype", reduce_dtype, problem)


def _check_group(group: object) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    problem = (
        f"reduces nothing, and there are {ranks} ranks; use torch.distributed.group.WORLD, or a "
        "group of this rank alone"
    )
    require(group is not None or ranks == 1, "group", None, problem)
    problem = "is not a process group; use torch.distributed.group.WORLD"
    require(isinstance(group, dist.ProcessGroup | None), "group", group, problem)


def _check_reproducible(world_size: int, reduce_dtype: torch.dtype) -> None:
    problem = (
        f"sums along a binary tree, which {world_size} ranks do not make; use 1, 2, 4, 8 ... ranks"
    )
    require(not world_size & (world_size - 1), "reproducible", True, problem)
    problem = (
        "cannot reduce in 16 bits: the rounding would depend on the number of ranks; use "
        "reduce_dtype float32"
    )
    require(reduce_dtype == torch.float32, "reproducible", True, problem)
