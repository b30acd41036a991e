"""A reduce-scatter that sums in FP32 and may communicate in 16 bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.buckets.exchange import Exchange
from distmp.distributed.collectives import has_native_reduce_scatter, reduce_scatter
from distmp.distributed.machines import exchange_groups


def reduce_scatter_sum(
    output: Tensor,
    gradients: Tensor,
    groups: tuple[dist.ProcessGroup, ...],
    comm_dtype: torch.dtype,
) -> None:
    """Sum gradients over ranks in FP32 and give every rank its shard of the sum.

    With a 16-bit communication dtype the shards are exchanged by all-to-all and summed here, so
    each value is rounded once, for any number of ranks, and over several machines the sum of each
    machine once. Gradients that have 16-bit values lose nothing in the first rounding. A reduction
    by the backend would round after every addition. On CPUs FP32 is exchanged too, which causes
    half the traffic of gloo's reduction.

    Args:
        output: Receives this rank's shard of the sum; FP32, shape (n,).
        gradients: This rank's gradients, the shards of all ranks in rank order; FP32, shape
            (ranks * n,).
        groups: The groups to sum over, one after the other, as `reduction_groups` returns them.
        comm_dtype: Communication dtype: float32, bfloat16 or float16.
    """
    if _reduces_natively(comm_dtype, gradients.device):
        reduce_scatter(output, gradients, *groups).wait()
        return
    exchange = Exchange(gradients, groups, comm_dtype)
    while not exchange.advance(output):
        pass


def reduction_groups(
    group: dist.ProcessGroup, device: torch.device, comm_dtype: torch.dtype, *, copies: int = 1
) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups for `reduce_scatter_sum`; every rank of the default group has to call it.

    Args:
        group: The ranks to sum over.
        device: The device of the gradients.
        comm_dtype: Communication dtype.
        copies: Number of such groups, see `exchange_groups`.
    """
    if _reduces_natively(comm_dtype, device):
        return (group,)
    return exchange_groups(group, device, copies=copies)


def _reduces_natively(comm_dtype: torch.dtype, device: torch.device) -> bool:
    return comm_dtype == torch.float32 and has_native_reduce_scatter(device)
