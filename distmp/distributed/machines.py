"""Process groups that follow the machines of a job."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from distmp.distributed.rank_environment import local_world_size

# Empty for a group that is not divided: a value that refers to its key would keep it alive.
_created: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]] = WeakKeyDictionary()


def exchange_groups(
    group: dist.ProcessGroup, device: torch.device, *, copies: int = 1
) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which to sum one after the other, instead of over `group` at once.

    If `group` has several ranks on each of several machines, these are the ranks of this machine,
    then the ranks with the same local rank on all machines. A network card then carries 1 / (ranks
    per machine) of the data that an all-to-all over `group` would send through it. Otherwise it is
    `group` alone, for example if machines have different numbers of ranks, or if a launcher does
    not number the ranks machine by machine.

    Every rank of the default group has to call it. The answer is found once for each group.

    Args:
        group: The group of this rank.
        device: The device that this rank communicates from.
        copies: Number of groups like `group`. Together they have to be the default group, in the
            order of ranks; if they are not, the result is `group` alone.
    """
    if copies * group.size() != dist.get_world_size():
        return (group,)
    if group not in _created:
        local = _ranks_per_machine(device)
        machines, remainder = divmod(group.size(), local)
        divided = not remainder and machines > 1 and local > 1
        _created[group] = _create(device, (copies, machines, local)) if divided else ()
    return _created[group] or (group,)


def _ranks_per_machine(device: torch.device) -> int:
    """Return the number of ranks on every machine, or 1 if machines or numberings differ."""
    own = local_world_size(dist.get_world_size())
    in_order = int(os.environ.get("LOCAL_RANK", -1)) == dist.get_rank() % own
    # Compare even if all ranks seem to be on this machine: other ranks may know of more.
    common = torch.tensor([own, -own, int(in_order)], device=device)
    dist.all_reduce(common, dist.ReduceOp.MIN)
    least, most, in_order = common.tolist()
    return own if least == -most and in_order else 1


def _create(device: torch.device, shape: tuple[int, int, int]) -> tuple[dist.ProcessGroup, ...]:
    # Import lazily: most runs do not need it.
    from torch.distributed.device_mesh import init_device_mesh

    names = ("copy", "machine", "local")
    skipped = 1 if shape[0] == 1 else 0  # a dimension of size 1 would create groups too
    mesh = init_device_mesh(device.type, shape[skipped:], mesh_dim_names=names[skipped:])
    return mesh.get_group("local"), mesh.get_group("machine")
