"""The collectives of FSDP2: their order is compared between ranks, and sums are in FP32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.buckets.reduction import Exchange
from distmp.distributed import collectives
from distmp.parallel.collective_order import CollectiveOrder, ComparedCollective


class AllGather:
    """The all-gather of FSDP, which checks the order first.

    Args:
        order: Compares the order of collectives between ranks.
        unit: Index of the parameter group.
    """

    def __init__(self, order: CollectiveOrder, unit: int) -> None:
        self._order = order
        self._unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer for the collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather the shards of the group into `output_tensor`."""
        self._order.note(ComparedCollective("gather", self._unit, input_tensor.numel()))
        collectives.all_gather_on_stream(output_tensor, input_tensor, group)


class ReduceScatter(AllGather):
    """The reduce-scatter of FSDP: a sum in FP32 for every communication dtype.

    With a 16-bit communication dtype the shards are exchanged by all-to-all and summed here, so
    each value is rounded once, for any number of ranks, and over several machines the sum of each
    machine once. Gradients that have 16-bit values lose nothing in the first rounding. A reduction
    by the backend would round after every addition. On CPUs FP32 is exchanged too, which causes
    half the traffic of gloo's reduction.

    All ranks have to construct it at the same time, because it may create process groups.

    Args:
        order: Compares the order of collectives between ranks.
        unit: Index of the parameter group.
        comm_dtype: Dtype in which gradients are sent.
        group: The ranks that share the shards.
        device: The device that this rank computes on.
        copies: Number of copies of the model, see `exchange_groups`.
    """

    def __init__(
        self,
        order: CollectiveOrder,
        unit: int,
        comm_dtype: torch.dtype,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        copies: int,
    ) -> None:
        super().__init__(order, unit)
        self._comm_dtype = comm_dtype
        self._native = comm_dtype == torch.float32 and collectives.has_native_reduce_scatter(device)
        self._groups = (
            (group,) if self._native else collectives.exchange_groups(group, device, copies=copies)
        )

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum over the group to `output_tensor`."""
        self._order.note(ComparedCollective("reduce", self._unit, input_tensor.numel()))
        if self._native:
            collectives.reduce_scatter_on_stream(output_tensor, input_tensor, *self._groups)
        else:
            exchange = Exchange(input_tensor, self._groups, self._comm_dtype)
            while not exchange.advance(output_tensor):
                pass
        if input_tensor.device.type == "cpu":
            # FSDP keeps the input until a later reduction, which only CUDA streams need.
            input_tensor.untyped_storage().resize_(0)
