"""FP32 gradient accumulation and the reduction over ranks, for replicated parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.buckets.layout import ALIGNMENT, SUMMED_DTYPES, check_parameters, plan_buckets
from distmp.buckets.partial_sums import FlatGradients, PartialSums
from distmp.buckets.reduction import AllReduce, AllToAllReduce, Reduction
from distmp.buckets.used import UsedParameters
from distmp.distributed.collectives import has_native_reduce_scatter
from distmp.distributed.compare_ranks import check_same, describe_parameters
from distmp.distributed.lost_peers import explain_lost_peers
from distmp.errors import ConfigError, TrainingError
from distmp.scaling.norms import CHUNK, chunk_norms


@dataclass(eq=False, slots=True)
class _Slot:
    """A parameter's place in the buckets.

    Attributes:
        target: The tensor that the optimizer steps: the parameter, its FP32 master, or this rank's
            share of one of them (1-dim).
        arrived: Whether its place holds a gradient of this step (of this microbatch where
            microbatches are kept apart).
    """

    name: str
    parameter: nn.Parameter
    bucket: int
    index: int
    target: Tensor
    arrived: bool = False


class Fp32GradBuckets:
    """Flat FP32 buckets that take the gradients of all microbatches, summed over ranks.

    No wrapper is needed around the module. A hook on each parameter takes its gradient as soon as
    backward has it: the first microbatch of a step copies it into the bucket, later ones add, and
    `.grad` is freed at once. Uses of one weight inside a backward sum in FP32 as well, also where
    the parameter has 16 bits (`Tensor.grad_dtype`).

    During the last backward a bucket is reduced (SUM) as soon as all of its parameters are in,
    while backward goes on. Reductions start in one order on every rank, whatever order gradients
    arrive in: that of the buckets at first (reverse registration), then the one that rank 0
    observed in the first step. A parameter without a gradient counts as zero, unless no rank ever
    had one: then the optimizer finds None, as in plain torch. As long as there is such a parameter,
    every step exchanges a flag for it and the host waits for the answer (`UsedParameters`).

    A step is `begin_step`; for each microbatch `begin_microbatch`, forward, one backward and
    `end_microbatch`; then `finish`. Afterwards the `.grad` of every parameter (or of what `attach`
    put in its place) is a view of a bucket. If the optimizer skips the step, tell it by `end_step`.

    Args:
        named_parameters: Trainable parameters with their names, in order of registration. All ranks
            need the same. One that is frozen later counts as absent while it is.
        group: Ranks to reduce over; None for a single process, which reduces nothing.
        bucket_bytes: Size from which a bucket is closed; None takes 25 MiB, on CPUs 6 MiB.
        reduce_dtype: What travels between ranks: float32, or bfloat16 or float16 by all-to-all,
            summed in FP32 in the order of ranks, so that each value is rounded once before the sum.
        shard: Reduce-scatter: only this rank's shard of each bucket is summed.
        reproducible: The same bits however the microbatches of the global batch are spread over
            ranks: they are the leaves of one binary tree, rank after rank. Needs powers of two of
            ranks and of microbatches, and memory for log2(microbatches) more sets of buckets.
        drop_non_finite: Keep every microbatch apart until `microbatch_is_finite` has told whether
            it is to be left out. Needs memory for one more set of buckets, and nothing overlaps.
        overlap: False reduces only in `finish`. Of several buckets on one group only the first may
            overlap, or the order of their reductions would depend on timing.

    Attributes:
        layouts: What stands in each bucket.
        buffers: After `finish`: the flat FP32 buckets, shape (size of the layout,).

    Raises:
        ConfigError: If an argument cannot work or differs between ranks, or `reproducible` does not
            fit the number of ranks or the reduce dtype.

    Example:
        >>> weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> buckets = Fp32GradBuckets([("weight", weight)], group=None)
        >>> buckets.begin_step()
        >>> for microbatch in range(300):
        ...     buckets.begin_microbatch(last=microbatch == 299)
        ...     weight.sum().backward()
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
        overlap: bool = True,
    ) -> None:
        options: dict[str, object] = {
            "shard": shard,
            "reproducible": reproducible,
            "drop_non_finite": drop_non_finite,
            "overlap": overlap,
        }
        _check_options(options, bucket_bytes, reduce_dtype)
        _check_group(group)
        named_parameters = check_parameters(named_parameters)
        described = {name: repr(value) for name, value in options.items()}
        described |= {"bucket_bytes": repr(bucket_bytes), "reduce_dtype": repr(reduce_dtype)}
        device = named_parameters[0][1].device
        check_same(group, device, described | describe_parameters(named_parameters))
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.sharded = shard and self.world_size > 1
        if reproducible:
            _check_reproducible(self.world_size, reduce_dtype)
        unit = CHUNK if reproducible else ALIGNMENT
        self.layouts = plan_buckets(named_parameters, bucket_bytes, unit * self.world_size)
        self._reduction = self._build_reduction(reduce_dtype, pairwise=reproducible)
        # What backward writes to, and what holds the result; the same set unless sums are kept.
        self._leaf = self._total = FlatGradients(self.layouts)
        self._drop_non_finite = drop_non_finite
        self._overlap = overlap and not drop_non_finite
        keeps_apart = reproducible or drop_non_finite
        self._sums = PartialSums(self.layouts, pairwise=reproducible) if keeps_apart else None
        self._order = list(range(len(self.layouts)))
        self._observed: list[int] | None = []
        self._slots = list(self._make_slots())
        self._by_bucket: list[list[_Slot]] = [[] for _ in self.layouts]
        for slot in self._slots:
            self._by_bucket[slot.bucket].append(slot)
        self._used = UsedParameters(self._slots, group, device)
        self._waiting_for: list[set[_Slot]] = []
        self._launched = 0
        self._accumulating = False
        self._last_microbatch = False
        # Of a step: "begun", "last" microbatch announced, "ended" but for `finish`; "" in between.
        self._stage = ""

    @property
    def buffers(self) -> list[Tensor]:
        """The flat FP32 buckets of the finished step; with `shard` only `shards` mean something."""
        return self._total.buffers

    @property
    def partial_sums(self) -> list[Tensor]:
        """What is held besides `buffers` where microbatches are kept apart."""
        if self._sums is None:
            return []
        held = [*self._leaf.buffers, *self._sums.buffers]
        return [buffer for buffer in held if not any(buffer is own for own in self.buffers)]

    @property
    def shards(self) -> list[Tensor]:
        """This rank's 1/ranks part of every bucket, contiguous."""
        return [
            buffer[layout.shard(self.rank, self.world_size)]
            for layout, buffer in zip(self.layouts, self.buffers, strict=True)
        ]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter by name, as views of the finished buckets."""
        return {slot.name: self._total.views[slot.bucket][slot.index] for slot in self._slots}

    @property
    def unused(self) -> list[str]:
        """Names of the parameters that no rank has ever used."""
        return [slot.name for slot in self._used.unused]

    @unused.setter
    def unused(self, names: Iterable[str]) -> None:
        found = set(names)
        self._used.unused = [slot for slot in self._slots if slot.name in found]

    def attach(self, bucket: int, index: int, target: Tensor) -> None:
        """Give the gradient of a parameter to another tensor that the optimizer steps in its place.

        Args:
            bucket: Which bucket the parameter is in.
            index: Which parameter of the bucket it is.
            target: FP32; in the parameter's shape, or with `shard` this rank's share of its
                elements, 1-dim.
        """
        self._by_bucket[bucket][index].target = target

    def begin_step(self) -> None:
        """Start from zero; what an unfinished step has left is discarded.

        Raises:
            TrainingError: If only `finish` was left out of the step before.
        """
        if self._stage == "ended":
            raise TrainingError(
                "finish() was not called after the last microbatch, so the gradients would be "
                "lost; call it before the optimizer's step, or discard() to leave the step out"
            )
        self.discard()
        self._stage = "begun"
        self._used.begin_step()
        for slot in self._slots:
            slot.arrived = False
            slot.parameter.grad = None
            slot.target.grad = None

    def begin_microbatch(self, *, last: bool) -> None:
        """Announce a backward; buckets are reduced during the one announced as `last`.

        Raises:
            TrainingError: Without `begin_step` before, or after one that was announced as `last`.
        """
        if self._stage != "begun":
            reason = "after one with last=True" if self._last_microbatch else "without begin_step()"
            raise TrainingError(
                f"begin_microbatch() was called {reason}; a step is begin_step(), "
                "begin_microbatch() for each microbatch, the last one with last=True, and finish()"
            )
        self._stage = "last" if last else "begun"
        self._accumulating = True
        self._last_microbatch = last
        self._launched = 0
        if self._sums is not None:
            for slot in self._slots:
                slot.arrived = False
        if last:
            self._waiting_for = [
                {slot for slot in slots if slot.parameter.requires_grad}
                for slots in self._by_bucket
            ]

    @torch.no_grad()
    def microbatch_is_finite(self) -> Tensor | None:
        """Return whether all gradients of the microbatch that backward is through with are finite.

        Returns:
            With `drop_non_finite`, on the device, 0-dim bool. Otherwise None.
        """
        if not self._drop_non_finite:
            return None
        for bucket in range(len(self.layouts)):
            self._fill_absent(bucket)
        return torch.stack(
            [chunk_norms([buffer]).isfinite().all() for buffer in self._leaf.buffers]
        ).all()

    @torch.no_grad()
    def end_microbatch(self, kept: Tensor | None = None) -> None:
        """Take note that backward is over.

        Args:
            kept: 0-dim bool, usually what `microbatch_is_finite` said; if False the microbatch is
                left out, and so must be its loss and weight. None keeps it.
        """
        self._used.end_microbatch(kept)
        if kept is not None:
            for buffer in self._leaf.buffers:
                buffer.masked_fill_(~kept, 0.0)
        if self._stage == "last":
            self._stage = "ended"
        if self._sums is not None and not self._last_microbatch:
            for bucket in range(len(self.layouts)):
                self._fill_absent(bucket)
            self._leaf = self._sums.add(self._leaf)

    @torch.no_grad()
    def finish(self) -> None:
        """Launch what no gradient has arrived for, and wait for every reduction.

        Raises:
            TrainingError: If no microbatch was announced as `last`.
            LostPeerError: If another rank has ended.
        """
        if self._stage not in ("last", "ended"):
            raise TrainingError(
                "finish() was called without a microbatch that begin_microbatch(last=True) has "
                "announced; announce the last one of a step so"
            )
        self._stage = ""
        with explain_lost_peers(self.group):
            self._launch_up_to(len(self.layouts))
            if self._reduction is not None:
                self._reduction.finish()
            self._last_microbatch = self._accumulating = False
            if self._sums is not None:
                self._total = self._sums.total_after(self._leaf)
            self._agree_on_order()
            self._used.exchange_flags()
        for slot in self._slots:
            self._hand_over(slot)

    def check_places(self) -> None:
        """Refuse gradients that are no longer in the buckets.

        Raises:
            ConfigError: Naming the first parameter whose gradient was converted or moved.
        """
        for slot in self._slots:
            view = self._total.views[slot.bucket][slot.index]
            if (
                view.dtype != torch.float32
                or view.device != self._total.buffers[slot.bucket].device
            ):
                raise ConfigError(
                    "model",
                    slot.name,
                    "was converted or moved together with its gradient, as by model.to(); do that "
                    "before the engine is built, or build another engine",
                )

    def end_step(self, skipped: Tensor) -> None:
        """Take note of whether the optimizer skipped the step; without a call it did not.

        Args:
            skipped: 0-dim, not 0 if it did; the same on all ranks.
        """
        self._used.end_step(skipped)

    @torch.no_grad()
    def discard(self) -> None:
        """Leave nothing of an unfinished step; without effect after a finished one.

        If the last microbatch was announced, the other ranks may have started reductions: the rest
        of them are run, so every rank has to finish or to discard.
        """
        if self._last_microbatch and self._reduction is not None:
            for bucket in self._order[self._launched :]:
                self._reduction.launch(self._leaf.buffers[bucket])
            self._reduction.finish()
        self._last_microbatch = self._accumulating = False
        self._stage = ""
        if self._sums is not None:
            self._sums.clear()

    # The hooks

    def _make_slots(self) -> Iterator[_Slot]:
        for bucket, layout in enumerate(self.layouts):
            for index, (name, parameter) in enumerate(
                zip(layout.names, layout.parameters, strict=True)
            ):
                parameter.grad_dtype = torch.float32
                hook = _hook(weakref.ref(self), bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)
                yield _Slot(name, parameter, bucket, index, target=parameter)

    @torch.no_grad()
    def _arrived(self, slot: _Slot) -> None:
        # A backward outside of a step, as of another engine on the same model, is not ours.
        if not self._accumulating:
            return
        if self._last_microbatch and slot.bucket in self._order[: self._launched]:
            raise TrainingError(
                f"the gradient of {slot.name!r} arrived a second time in the last microbatch, "
                "after its bucket was reduced: call backward once for each microbatch, and use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        gradient = slot.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        place = self._leaf.views[slot.bucket][slot.index]
        if slot.arrived:
            place += gradient
        else:
            place.copy_(gradient)
        slot.arrived = True
        self._used.note(slot)
        slot.parameter.grad = None
        if self._last_microbatch and self._reduction is not None:
            self._note_complete(slot)

    def _note_complete(self, slot: _Slot) -> None:
        waiting_for = self._waiting_for[slot.bucket]
        waiting_for.discard(slot)
        if waiting_for or not self._overlap:
            return
        if self._observed is not None and slot.bucket not in self._observed:
            self._observed.append(slot.bucket)
        ready = self._launched
        while ready < len(self._order) and not self._waiting_for[self._order[ready]]:
            ready += 1
        self._launch_up_to(ready)

    # Sums over microbatches and ranks

    def _launch_up_to(self, end: int) -> None:
        for bucket in self._order[self._launched : end]:
            # Noted first: a gradient that comes now comes too late.
            self._launched += 1
            self._fill_absent(bucket)
            total = self._leaf.buffers[bucket]
            if self._sums is not None:
                total = self._sums.add_last(self._leaf, bucket)
            if self._reduction is not None:
                self._reduction.launch(total)

    def _fill_absent(self, bucket: int) -> None:
        for slot in self._by_bucket[bucket]:
            if not slot.arrived:
                self._leaf.views[bucket][slot.index].zero_()

    def _build_reduction(self, wire: torch.dtype, *, pairwise: bool) -> Reduction | None:
        if self.group is None:
            return None
        copies = self.sharded and not has_native_reduce_scatter(self.layouts[0].device)
        if wire == torch.float32 and not pairwise and not copies:
            return AllReduce(self.group, shard=self.sharded)
        return AllToAllReduce(self.group, shard=self.sharded, wire_dtype=wire, pairwise=pairwise)

    # What ranks exchange_flags on

    def _agree_on_order(self) -> None:
        """Start reductions in the order that rank 0 observed, from the second step on."""
        if self._observed is None or self.group is None:
            return
        order = [*self._observed, *(b for b in self._order if b not in self._observed)]
        agreed = torch.tensor(order, dtype=torch.int64, device=self.layouts[0].device)
        dist.broadcast(agreed, dist.get_global_rank(self.group, 0), self.group)
        self._order = agreed.tolist()
        self._observed = None

    def _hand_over(self, slot: _Slot) -> None:
        steps = slot.parameter.requires_grad and not self._used.leaves_alone(slot)
        view = self._total.views[slot.bucket][slot.index]
        if not self.sharded:
            slot.parameter.grad = view if steps else None
        if slot.target is not slot.parameter:
            gradient = self._share(slot) if self.sharded else view
            slot.target.grad = gradient if steps else None

    def _share(self, slot: _Slot) -> Tensor:
        layout = self.layouts[slot.bucket]
        share = layout.shares(layout.shard(self.rank, self.world_size))[slot.index]
        flat = self._total.buffers[slot.bucket]
        return flat[layout.offsets[slot.index] :][share]


def _hook(
    buckets: weakref.ref[Fp32GradBuckets], bucket: int, index: int
) -> Callable[[Tensor], None]:
    """Return the hook of a parameter, which must keep alive neither the buckets nor itself."""

    def arrived(_: Tensor) -> None:
        alive = buckets()
        if alive is not None:
            alive._arrived(alive._by_bucket[bucket][index])

    return arrived


def _check_options(switches: dict[str, object], bucket_bytes: object, reduce_dtype: object) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(name, value, "must be True or False")
    is_count = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
    if bucket_bytes is not None and not (is_count and bucket_bytes > 0):  # type: ignore[operator]
        raise ConfigError("bucket_bytes", bucket_bytes, "use a whole number above 0, or None")
    if reduce_dtype not in SUMMED_DTYPES:
        raise ConfigError(
            "reduce_dtype", reduce_dtype, "use torch.float32, torch.bfloat16 or torch.float16"
        )


def _check_group(group: object) -> None:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if group is None and several:
        raise ConfigError(
            "group",
            None,
            f"reduces nothing, and there are {dist.get_world_size()} ranks; use "
            "torch.distributed.group.WORLD, or a group of this rank alone",
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError("group", group, "is no process group; use torch.distributed.group.WORLD")


def _check_reproducible(world_size: int, reduce_dtype: torch.dtype) -> None:
    if world_size & (world_size - 1):
        raise ConfigError(
            "reproducible",
            True,
            f"sums along a binary tree, which {world_size} ranks do not make; use 1, 2, 4, 8 ...",
        )
    if reduce_dtype != torch.float32:
        raise ConfigError(
            "reproducible",
            True,
            "rounds nothing between ranks, whose number would show; use reduce_dtype float32",
        )
