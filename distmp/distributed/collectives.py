"""Collectives of flat tensors, under the names that this release of torch gives them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.progress import activity
from distmp.distributed.waiting import waiting

# torch 2.13 renamed them and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to put the shards of all ranks, in their order, into `gathered`."""
    activity.collective = "all_gather"
    return _started(_all_gather(gathered, shard, group=group, async_op=True), gathered)


def reduces_in_parts(device: torch.device) -> bool:
    """Return whether the backend for a device has a reduce-scatter of its own.

    Gloo, for CPUs, has none: torch copies the whole and all-reduces the copy, which is twice the
    traffic, and keeps it until the work is waited for.
    """
    return device.type != "cpu"


def reduce_scatter(shard: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to sum `whole` over ranks, each of which gets its part of the sum in `shard`."""
    activity.collective = "reduce_scatter"
    return _started(_reduce_scatter(shard, whole, group=group, async_op=True), whole)


def all_reduce(whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to sum `whole` over ranks, in place."""
    activity.collective = "all_reduce"
    return _started(dist.all_reduce(whole, group=group, async_op=True), whole)


def all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to send the r-th part of `sent` to rank r, from which comes the r-th of `received`."""
    activity.collective = "all_to_all"
    return _started(dist.all_to_all_single(received, sent, group=group, async_op=True), sent)


def _started(work: dist.Work | None, tensor: Tensor) -> dist.Work:
    assert work is not None  # None means that this rank is no member of the group
    return waiting.watch(work, tensor)
