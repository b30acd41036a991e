"""The ranks that decide together: a process group, a device mesh, or all ranks there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class RankGroup:
    """Sums small tensors over a set of ranks.

    Args:
        ranks: A process group; a device mesh of any number of dimensions, for all of its ranks; or
            None for all ranks of the default group, or this process alone if there is none.

    Raises:
        ConfigError: On a rank that is not in the group or mesh.
    """

    def __init__(self, ranks: dist.ProcessGroup | DeviceMesh | int | None) -> None:
        self._group: dist.ProcessGroup | None = None
        if ranks is None:
            return
        if isinstance(ranks, int):  # what `new_group` returns to ranks that are not in it
            raise _not_a_member(ranks)
        self._group = ranks if isinstance(ranks, dist.ProcessGroup) else _group_of_mesh(ranks)

    @property
    def is_default(self) -> bool:
        """Whether no particular group was given."""
        return self._group is None

    @property
    def world_size(self) -> int:
        """Number of ranks, as torch.distributed has it now."""
        return dist.get_world_size(self._group) if self._exists() else 1

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in one all-reduce, or in none where this process is alone."""
        if self.world_size == 1:
            return values
        types = _device_types(self._group)
        if values.device.type in types:
            dist.all_reduce(values, group=self._group)
            return values
        # Flags of gradients on the host, reduced by a backend that reaches only devices.
        moved = values.to(types[0])
        dist.all_reduce(moved, group=self._group)
        return moved.to(values.device)

    @staticmethod
    def _exists() -> bool:
        return dist.is_available() and dist.is_initialized()


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.get_coordinate() is None:
        raise _not_a_member(mesh)
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if mesh.ndim == 1:
        return mesh.get_group()
    members = mesh.mesh.flatten().tolist()
    return dist.new_group(members, use_local_synchronization=True)


def _not_a_member(ranks: object) -> ConfigError:
    return ConfigError("group", ranks, f"does not hold this rank, {dist.get_rank()}")


def _device_types(group: dist.ProcessGroup | None) -> list[str]:
    """Return the device types that a group's backends carry, as in "cpu:gloo,cuda:nccl"."""
    return [entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")]


def current_device(device_type: str) -> torch.device:
    """Return the device of a type that this rank uses."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)
