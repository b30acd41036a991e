"""A reduce-scatter that may send 16 bits and adds up in FP32."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.buckets.reduction import sum_in_order
from distmp.distributed.collectives import all_to_all, has_native_reduce_scatter, reduce_scatter


def reduce_scatter_sum(
    output: Tensor, gradients: Tensor, group: dist.ProcessGroup, wire_dtype: torch.dtype
) -> None:
    """Give every rank the sum over ranks of its part, FP32.

    With a 16-bit wire each value is rounded once, however many ranks there are: the parts are
    exchanged (all-to-all) and summed here in the order of ranks. Gradients that had 16 bits before
    lose nothing at all. A reduction by the backend would round after every addition. On CPUs FP32
    is exchanged as well, which takes half the traffic of gloo's reduction.

    Args:
        output: FP32, shape (n,); this rank's part of the sum.
        gradients: FP32, shape (ranks * n,); the parts of all ranks, one after the other.
        group: The ranks.
        wire_dtype: What is sent.
    """
    if wire_dtype == gradients.dtype and has_native_reduce_scatter(gradients.device):
        reduce_scatter(output, gradients, group).wait()
        return
    sent = gradients.to(wire_dtype)
    received = torch.empty_like(sent)
    all_to_all(received, sent, group).wait()
    sum_in_order(received.view(group.size(), -1), output)
