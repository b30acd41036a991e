"""The ranks that decide together: a process group, a device mesh, or all ranks there are."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed import rank_monitor
from distmp.distributed.rank_monitor import Presence, RankMonitor, Waiting
from distmp.errors import ConfigError, TrainingError
from distmp.scaling.calls import ADVICE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class RankGroup:
    """Sums small tensors over a set of ranks.

    Args:
        ranks: A process group; a device mesh of any number of dimensions, for all of its ranks; or
            None for all ranks of the default group, or this process alone if there is none.

    Attributes:
        latest: The latest sum over several ranks, where they can be asked about it.

    Raises:
        ConfigError: On a rank that is not in the group or mesh.
    """

    def __init__(self, ranks: dist.ProcessGroup | DeviceMesh | int | None) -> None:
        self._group: dist.ProcessGroup | None = None
        self.latest: Waiting | None = None
        if ranks is None:
            return
        if isinstance(ranks, int):  # what `new_group` returns to ranks that are not in it
            raise _not_a_member(ranks)
        if not isinstance(ranks, dist.ProcessGroup) and not hasattr(ranks, "get_coordinate"):
            raise ConfigError("group", ranks, "use a process group, a device mesh or None")
        self._group = ranks if isinstance(ranks, dist.ProcessGroup) else _group_of_mesh(ranks)

    @property
    def is_default(self) -> bool:
        """Whether no particular group was given."""
        return self._group is None

    @property
    def world_size(self) -> int:
        """Number of ranks, as torch.distributed has it now.

        Raises:
            ConfigError: Without a process group, if the environment says that there are several
                processes.
        """
        if self._exists():
            return dist.get_world_size(self._group)
        self.check_group()
        return 1

    def check_group(self) -> None:
        """Refuse to be alone where a launcher has started several processes.

        Raises:
            ConfigError: As `world_size`.
        """
        named = os.environ.get("WORLD_SIZE", "1").strip()
        if named in ("", "1") or self._exists():
            return
        raise ConfigError(
            "WORLD_SIZE",
            named,
            "the environment names several processes but there is no process group, so each rank "
            "would scale and skip on its own; call torch.distributed.init_process_group() in every "
            "process before the first step (torchrun sets what it needs), or set WORLD_SIZE=1 for "
            "a process of its own",
        )

    def _members(self) -> dist.ProcessGroup:
        group = self._group or dist.group.WORLD
        assert group is not None
        return group

    @staticmethod
    def _exists() -> bool:
        return dist.is_available() and dist.is_initialized()

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in one all-reduce, or in none where this process is alone.

        Raises:
            TrainingError: If the reduction fails because a rank did not come. It says where that
                rank is.
        """
        if self.world_size == 1:
            return values
        group, monitor = self._members(), rank_monitor.current()
        if monitor is None:
            return _all_reduce(values, group)
        self.latest = monitor.begin(group)
        try:
            total = _all_reduce(values, group)
        except RuntimeError as error:
            _raise_absent(monitor, self.latest, error)
            raise
        if total.is_cuda:
            self.latest.is_over = _end_of_work(total.device)
        else:
            monitor.end()
        return total

    def await_others(self, seconds: float) -> None:
        """Wait until all other ranks are in a decision, which with this one's then comes to an end.

        For a decision that nobody may be going to meet.

        Raises:
            TrainingError: If some rank has not come after so many seconds. It says where it is.
        """
        monitor = rank_monitor.current()
        if monitor is None:
            return
        deadline = time.monotonic() + seconds
        with monitor.announced(self._members()) as decision:
            while absent := monitor.absent(decision):
                if time.monotonic() > deadline:
                    raise _absence(monitor, absent)

    def exchange(self, decision: Waiting | None, name: str, value: Any) -> dict[int, Any]:
        """Return what every rank says about a decision, by rank, as JSON returns it.

        Args:
            decision: What `latest` was after the reduction.
            name: What it is about.
            value: What this rank says.
        """
        monitor = rank_monitor.current()
        if monitor is not None and decision is not None:
            return monitor.exchange(decision, name, value)
        ranks = dist.get_process_group_ranks(self._members())
        values: list[Any] = [None] * len(ranks)
        dist.all_gather_object(values, value, self._group)
        return dict(zip(ranks, values, strict=True))


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
    rank = dist.get_rank() if dist.is_initialized() else 0
    return ConfigError("group", ranks, f"does not hold this rank, {rank}")


def _all_reduce(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    backends = _backends(group)
    device_type = values.device.type
    if device_type not in backends:
        # Flags of gradients on the host, reduced by a backend that reaches only devices.
        device_type = next(iter(backends))
    carried = values if device_type == values.device.type else values.to(device_type)
    if backends[device_type] == "gloo":
        dist.all_reduce(carried, group=_channel(group, device_type), async_op=True).wait()
    else:
        dist.all_reduce(carried, group=group)
    return carried.to(values.device)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type; torch says "cpu:gloo,cuda:nccl"."""
    entries = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (entry.partition(":") for entry in entries)}


def _channel(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return connections between the ranks of a group that carry nothing but decisions.

    Gloo matches what ranks send by order alone, and ends the process where sizes differ. A rank
    that leaves out a decision would meet the others' decision with its next reduction of gradients.
    """
    if group not in _channels:
        name = group.group_name
        _channels_made[name] += 1
        store = rank_monitor.store_of_its_own(f"decisions {name} {_channels_made[name]}")
        if store is None:
            return group
        timeout = group._get_backend(torch.device(device_type)).options._timeout
        _channels[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    return _channels[group]


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
# How many by name of the group: one that stands in the place of a destroyed one may have its store.
_channels_made: Counter[str] = Counter()


def _end_of_work(device: torch.device) -> Any:
    """Return a function that tells, without waiting, whether a device has come here."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def _raise_absent(monitor: RankMonitor, decision: Waiting, error: RuntimeError) -> None:
    """Raise which ranks have not come to a decision, if that is why its reduction failed."""
    try:
        absent = monitor.absent(decision)
    except RuntimeError:
        raise TrainingError(
            f"{monitor.last_call} failed because neither other ranks nor the store of the process "
            "group can be reached: rank 0, which keeps the store unless torchrun does, has ended "
            "or is cut off"
        ) from error
    if absent:
        raise _absence(monitor, absent) from error


def _absence(monitor: RankMonitor, absent: Mapping[int, Presence | None]) -> TrainingError:
    where = rank_monitor.in_words(absent)
    return TrainingError(f"{monitor.last_call} failed because ranks are missing: {where}; {ADVICE}")


def current_device(device_type: str) -> torch.device:
    """Return the device of a type that this rank uses."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)
