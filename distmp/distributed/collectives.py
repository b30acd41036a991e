"""Asynchronous collectives of flat tensors, with the function names of the installed torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.failing_together import Ranks
from distmp.distributed.progress import current_phase
from distmp.distributed.rank_environment import local_world_size
from distmp.distributed.wait_times import collective_waits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed these functions and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend of each device type; torch's format is "cpu:gloo,cuda:nccl"."""
    entries = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (entry.partition(":") for entry in entries)}


def all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to gather the shards of all ranks, in rank order, into `gathered`."""
    return _start("all_gather", gathered, _all_gather, gathered, shard, group=group)


def all_gather_on_stream(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the shards of all ranks; on CUDA as work of the current stream, with its priority.

    An asynchronous collective runs on a stream of the group, which has the priority of kernels that
    compute.
    """
    current_phase.collective = "all_gather"
    with collective_waits.measured(gathered.device):
        _all_gather(gathered, shard, group=group)


def has_native_reduce_scatter(device: torch.device) -> bool:
    """Return whether the backend for a device implements reduce-scatter.

    Gloo on CPUs does not: torch all-reduces a copy of the full tensor, which doubles the traffic,
    and keeps the copy until `wait`.
    """
    return device.type != "cpu"


def reduce_scatter(shard: Tensor, full: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to sum `full` over ranks; each rank receives its part of the sum in `shard`."""
    return _start("reduce_scatter", full, _reduce_scatter, shard, full, group=group)


def reduce_scatter_on_stream(shard: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `full` over ranks into `shard`, as `all_gather_on_stream` gathers."""
    current_phase.collective = "reduce_scatter"
    with collective_waits.measured(full.device):
        _reduce_scatter(shard, full, group=group)


def all_reduce(full: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to sum `full` over ranks, in place."""
    return _start("all_reduce", full, dist.all_reduce, full, group=group)


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | None,
    received_sizes: list[int] | None = None,
    sent_sizes: list[int] | None = None,
) -> dist.Work:
    """Start to send part r of `sent` to rank r, and to receive part r of `received` from it.

    Parts have equal sizes unless sizes are passed.
    """
    parts = received, sent, received_sizes, sent_sizes
    return _start("all_to_all", sent, dist.all_to_all_single, *parts, group=group)


def _start(name: str, tensor: Tensor, collective: Any, *arguments: Any, group: Any) -> dist.Work:
    current_phase.collective = name
    work = collective(*arguments, group=group, async_op=True)
    assert work is not None  # None means that this rank is not in the group
    return collective_waits.watch(work, tensor)


# Empty for a group that is not divided: a value that refers to its key would keep it alive.
_created: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]] = WeakKeyDictionary()


def exchange_groups(
    group: dist.ProcessGroup, device: torch.device, *, copies: int = 1
) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups to sum over, one after the other, instead of over `group`.

    If `group` has several ranks on each of several machines, these are the ranks of this machine,
    then the ranks with the same local rank on all machines. A network card then carries 1 / (ranks
    per machine) of the data that an all-to-all over `group` would send through it. Otherwise it is
    `group` alone, for example if machines have different numbers of ranks, or if a launcher does
    not number the ranks machine by machine.

    Every rank of the default group has to call it. The result is cached for each group.

    Args:
        group: The group of this rank.
        device: The device that this rank communicates from.
        copies: Number of groups like `group`. Together they have to be the default group, in the
            order of ranks; if they are not, the result is `group` alone.
    """
    if copies * group.size() != dist.get_world_size():
        return (group,)
    if group not in _created:
        local = _ranks_per_machine()
        machines, remainder = divmod(group.size(), local)
        divided = not remainder and machines > 1 and local > 1
        _created[group] = _create(device, (copies, machines, local)) if divided else ()
    return _created[group] or (group,)


def _ranks_per_machine() -> int:
    """Return the number of ranks on every machine, or 1 if machines or numberings differ."""
    own = local_world_size(dist.get_world_size())
    in_order = int(os.environ.get("LOCAL_RANK", -1)) == dist.get_rank() % own
    # Compare even if all ranks seem to be on this machine: other ranks may see several machines.
    return own if {*Ranks(None).gather((own, in_order))} == {(own, True)} else 1


def _create(device: torch.device, shape: tuple[int, int, int]) -> tuple[dist.ProcessGroup, ...]:
    names = ("copy", "machine", "local")
    skipped = 1 if shape[0] == 1 else 0  # a dimension of size 1 would create groups too
    mesh = create_mesh(device, shape[skipped:], names[skipped:])
    return mesh.get_group("local"), mesh.get_group("machine")


def create_mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks; torch would give its groups another timeout than the default's.

    Args:
        device: The device that this rank communicates from.
        shape: The size of each dimension.
        names: The name of each dimension.
    """
    # Import lazily: most runs do not need it.
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    default: Any = dist.group.WORLD
    options: Any = getattr(default._get_backend(device), "options", None)
    if options is not None:  # simulated ranks have none
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(options._timeout, group)
    return mesh
