"""Asynchronous collectives of flat tensors, with the function names of the installed torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.progress import current_phase
from distmp.distributed.waiting import collective_waits

# torch 2.13 renamed these functions and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def device_of_host_values(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from which ranks exchange values of the host: the CPU if the group can."""
    backends = str(dist.get_backend_config(group))
    if "nccl" in backends and "cpu:" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to gather the shards of all ranks, in rank order, into `gathered`."""
    current_phase.collective = "all_gather"
    return _started(_all_gather(gathered, shard, group=group, async_op=True), gathered)


def has_native_reduce_scatter(device: torch.device) -> bool:
    """Return whether the backend for a device implements reduce-scatter.

    Gloo, for CPUs, does not: torch copies the full tensor, all-reduces the copy, which doubles the
    traffic, and keeps the copy until the work is waited for.
    """
    return device.type != "cpu"


def reduce_scatter(shard: Tensor, full: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to sum `full` over ranks; each rank receives its part of the sum in `shard`."""
    current_phase.collective = "reduce_scatter"
    return _started(_reduce_scatter(shard, full, group=group, async_op=True), full)


def all_reduce(full: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to sum `full` over ranks, in place."""
    current_phase.collective = "all_reduce"
    return _started(dist.all_reduce(full, group=group, async_op=True), full)


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | None,
    received_sizes: list[int] | None = None,
    sent_sizes: list[int] | None = None,
) -> dist.Work:
    """Start to send part r of `sent` to rank r, and to receive part r of `received` from it.

    Parts are equal unless their sizes are given.
    """
    current_phase.collective = "all_to_all"
    work = dist.all_to_all_single(
        received, sent, received_sizes, sent_sizes, group=group, async_op=True
    )
    return _started(work, sent)


def _started(work: dist.Work | None, tensor: Tensor) -> dist.Work:
    assert work is not None  # None means that this rank is not in the group
    return collective_waits.watch(work, tensor)
