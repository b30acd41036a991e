"""The ranks that decide together: a process group, a device mesh, or all ranks."""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed import rank_monitor
from distmp.distributed.collectives import backends
from distmp.distributed.rank_monitor import PendingDecision, RankMonitor
from distmp.errors import ConfigError, TrainingError
from distmp.scaling.calls import ADVICE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class RankGroup:
    """Sums small tensors over a set of ranks, and names the ranks that are missing.

    Args:
        ranks: A process group; a device mesh of any number of dimensions, for all of its ranks; or
            None for all ranks of the default group, or for this process alone without a group.

    Attributes:
        group: The group of a group or mesh that was given; None for all ranks.
        latest_decision: The latest reduction over several ranks; None before the first one, and if
            the status of ranks cannot be queried.

    Raises:
        ConfigError: On a rank that is not in the group or mesh.
    """

    def __init__(self, ranks: dist.ProcessGroup | DeviceMesh | int | None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.latest_decision: PendingDecision | None = None
        if ranks is None:
            return
        if isinstance(ranks, int):  # `new_group` returns an int on ranks that are not in the group
            raise _not_a_member(ranks)
        self.group = ranks if isinstance(ranks, dist.ProcessGroup) else _group_of_mesh(ranks)

    @property
    def world_size(self) -> int:
        """Current number of ranks.

        Raises:
            ConfigError: Without a process group, if a launcher has set WORLD_SIZE above 1.
        """
        if dist.is_initialized():
            return dist.get_world_size(self.group)
        world_size = os.environ.get("WORLD_SIZE", "1").strip()
        if world_size in ("", "1"):
            return 1
        raise ConfigError(
            "WORLD_SIZE",
            world_size,
            "several ranks were started but there is no process group, so each rank would scale "
            "and skip on its own; call torch.distributed.init_process_group() in every process "
            "before the first step (torchrun sets what it needs), or set WORLD_SIZE=1 for "
            "processes that train independently",
        )

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the ranks; no communication for a single process.

        Raises:
            TrainingError: If the reduction fails because a rank is missing, with its status.
        """
        if self.world_size == 1:
            return values
        group, monitor = self.group or dist.group.WORLD, rank_monitor.current()
        assert group is not None
        if monitor is None:
            return _all_reduce(values, group)
        self.latest_decision = monitor.begin(group)
        try:
            total = _all_reduce(values, group)
        except RuntimeError as error:
            _raise_if_ranks_missing(monitor, self.latest_decision, error)
            raise
        if total.is_cuda:
            self.latest_decision.is_over = _completion_query(total.device)
        else:
            monitor.end()
        return total

    def others_decide(self, seconds: float) -> bool:
        """Wait for the other ranks; return whether all of them begin the next decision in time."""
        if self.world_size == 1 or (monitor := rank_monitor.current()) is None:
            return False
        group = self.group or dist.group.WORLD
        assert group is not None
        deadline, decision = time.monotonic() + seconds, monitor.begin(group)
        try:
            while missing := monitor.missing(decision):
                if time.monotonic() > deadline:
                    break
        finally:
            monitor.end()
            monitor.own.decisions[decision.group] -= 1  # this rank does not begin it here
        return not missing

    def exchange(self, decision: PendingDecision | None, value: Any) -> dict[int, Any]:
        """Gather a value from every rank of a decision; return the values by rank.

        Without a store that all ranks reach, it returns only that of this rank.

        Args:
            decision: `latest_decision` after the reduction.
            value: Value of this rank: anything that JSON can represent.
        """
        monitor = rank_monitor.current()
        if monitor is None or decision is None:
            return {dist.get_rank(): value}
        return monitor.exchange(decision, "calls", value)


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
    return ConfigError("group", ranks, f"does not contain this rank, {rank}")


def _all_reduce(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    of_devices = backends(group)
    device_type = values.device.type
    if device_type not in of_devices:
        # Flags on the CPU, for a group whose backend communicates only device tensors.
        device_type = next(iter(of_devices))
    reduced = values if device_type == values.device.type else values.to(device_type)
    if of_devices[device_type] == "gloo":
        dist.all_reduce(reduced, group=_decision_group(group, device_type), async_op=True).wait()
    else:
        dist.all_reduce(reduced, group=group)
    return reduced.to(values.device)


def _decision_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return a group of the same ranks with separate connections, used only for decisions.

    Gloo matches collectives by their order alone, and aborts the process if sizes differ. If a rank
    left out a decision, its next reduction of gradients would be matched with the decision of the
    others.
    """
    if group not in _decision_groups:
        store = rank_monitor.open_store(f"decisions {group.group_name}")
        if store is None:
            return group
        timeout = group._get_backend(torch.device(device_type)).options._timeout
        _decision_groups[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    return _decision_groups[group]


_decision_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def _completion_query(device: torch.device) -> Any:
    """Return a function that returns whether the device has reached this point; it never waits."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def _raise_if_ranks_missing(
    monitor: RankMonitor, decision: PendingDecision, error: RuntimeError
) -> None:
    """Raise an error that names the missing ranks, if the reduction failed because of them."""
    call = monitor.own.last_call
    try:
        missing = monitor.missing(decision)
    except RuntimeError:
        raise TrainingError(
            f"{call} failed because neither other ranks nor the store of the process "
            "group can be reached: rank 0, which hosts the store unless torchrun does, has ended "
            "or is unreachable"
        ) from error
    if missing:
        statuses = monitor.describe(missing)
        raise TrainingError(
            f"{call} failed because ranks are missing: {statuses}; {ADVICE}"
        ) from error
