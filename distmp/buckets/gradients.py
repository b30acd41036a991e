"""FP32 gradient accumulation and the reduction over ranks, for replicated parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.buckets.layout import DEFAULT_BUCKET_BYTES, plan_buckets
from distmp.errors import TrainingError


class Fp32GradBuckets:
    """Flat FP32 buckets in which autograd itself accumulates the gradients of all microbatches.

    The `.grad` of every parameter is a view of a bucket, and stays one: autograd adds each
    microbatch in place, in FP32 also where the parameter has 16 bits (`Tensor.grad_dtype`). During
    the last backward a bucket is reduced (SUM) as soon as all of its parameters have arrived,
    while backward goes on. Buckets start in index order on every rank, whatever order gradients
    arrive in, so that ranks with different unused parameters still match each other.

    Args:
        named_parameters: Trainable parameters with their names, in order of registration.
        group: Ranks to reduce over; None for a single process, which reduces nothing.
        bucket_bytes: Size from which a bucket is closed.

    Attributes:
        layouts: What stands in each bucket.
        buffers: The flat FP32 buckets.
        views: For each bucket, the part of each of its parameters, in the parameter's shape.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.group = group
        self.layouts = plan_buckets(named_parameters, bucket_bytes)
        self.buffers = [
            torch.zeros(layout.size, dtype=torch.float32, device=layout.parameters[0].device)
            for layout in self.layouts
        ]
        self.views = [
            layout.views(buffer) for layout, buffer in zip(self.layouts, self.buffers, strict=True)
        ]
        self._holders: list[tuple[Tensor, Tensor]] = []
        self._waiting_for: list[set[int]] = []
        self._pending: list[dist.Work] = []
        self._launched = 0
        self._last_microbatch = False
        for index, layout in enumerate(self.layouts):
            for name, parameter in zip(layout.names, layout.parameters, strict=True):
                if group is not None:
                    self._register_hook(index, name, parameter)
            for parameter, view in zip(layout.parameters, self.views[index], strict=True):
                self.attach(parameter, view)
        self.begin_step()

    def attach(self, holder: Tensor, view: Tensor) -> None:
        """Make `view` of a bucket the `.grad` of `holder`, now and at the start of every step."""
        holder.grad_dtype = torch.float32
        holder.grad = view
        self._holders.append((holder, view))

    def begin_step(self) -> None:
        """Forget everything accumulated so far; also the way to discard an unfinished step."""
        self._last_microbatch = False
        self._launched = 0
        for work in self._pending:
            work.wait()
        self._pending.clear()
        self._waiting_for = [
            {id(parameter) for parameter in layout.parameters} for layout in self.layouts
        ]
        for buffer in self.buffers:
            buffer.zero_()
        for holder, view in self._holders:
            if holder.grad is not view:  # somebody called zero_grad()
                holder.grad = view

    def begin_microbatch(self, *, last: bool) -> None:
        """Announce a backward; buckets are reduced during the one announced as `last`."""
        self._last_microbatch = last

    def finish(self) -> None:
        """Launch what no gradient has arrived for, and wait for every reduction.

        Afterwards `buffers` hold the sum over microbatches and ranks.
        """
        if self.group is None:
            return
        self._launch_up_to(len(self.layouts))
        for work in self._pending:
            work.wait()
        self._pending.clear()
        # A backward outside of a step, as of another engine on the same model, is not ours.
        self._last_microbatch = False

    def _register_hook(self, index: int, name: str, parameter: nn.Parameter) -> None:
        def arrived(parameter: Tensor) -> None:
            if not self._last_microbatch:
                return
            if index < self._launched:
                raise TrainingError(
                    f"the gradient of {name!r} arrived a second time in one backward, after its "
                    "bucket was reduced; reentrant activation checkpointing does this: use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            self._waiting_for[index].discard(id(parameter))
            self._launch_complete()

        parameter.register_post_accumulate_grad_hook(arrived)

    def _launch_complete(self) -> None:
        while self._launched < len(self.layouts) and not self._waiting_for[self._launched]:
            self._launch_up_to(self._launched + 1)

    def _launch_up_to(self, end: int) -> None:
        for buffer in self.buffers[self._launched : end]:
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
            assert work is not None  # None means that this rank is no member of the group
            self._pending.append(work)
        self._launched = max(self._launched, end)
