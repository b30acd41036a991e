"""The collectives of the sharded strategies: gathering, and a reduction that sums in FP32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has given them new names and warns of the old ones.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor
)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)


def reduce_scatter_sum(
    output: Tensor, gradients: Tensor, group: dist.ProcessGroup, wire_dtype: torch.dtype
) -> None:
    """Give every rank the sum over ranks of its part, FP32.

    With a 16-bit wire each value is rounded once, however many ranks there are: the parts are
    exchanged (all-to-all) and summed here in the order of ranks. Gradients that had 16 bits before
    lose nothing at all. A reduction by the backend would round after every addition.

    Args:
        output: FP32, shape (n,); this rank's part of the sum.
        gradients: FP32, shape (ranks * n,); the parts of all ranks, one after the other.
        group: The ranks.
        wire_dtype: What is sent.
    """
    if wire_dtype == gradients.dtype:
        reduce_scatter(output, gradients, op=dist.ReduceOp.SUM, group=group)
        return
    received = torch.empty_like(gradients, dtype=wire_dtype)
    dist.all_to_all_single(received, gradients.to(wire_dtype), group=group)
    first, *others = received.view(group.size(), -1).unbind()
    output.copy_(first)
    for part in others:
        output.add_(part)
