"""Delays collective calls of an engine until all ranks have made them.

If a rank evaluates while the others take a step, its reduction is matched with a different
reduction, which aborts the process under gloo and gives wrong results or a hang under NCCL. So a
rank announces the call through the store of the process group and waits for the others. If they do
not arrive, it queries their status. A step is only counted: it neither waits nor writes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from distmp.distributed import rank_monitor
from distmp.distributed.lost_peers import lost_peer_error
from distmp.distributed.rank_monitor import RankMonitor, RankStatus
from distmp.distributed.world import World
from distmp.errors import DistmpError, TrainingError, rank_names

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# How long ranks wait before they query the status of missing ranks, and between two queries.
PATIENCE_SECONDS = 4.0
# A rank that does not answer this many queries in a row, about two minutes, counts as lost.
MAX_UNANSWERED = 12
# How much later than this rank another one may fail in the same call.
FAILURE_SECONDS = 5.0


class RollCall:
    """Counts the calls of engines on this rank, and waits until all ranks have made a call.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # Consecutive queries that a rank has not answered, by rank.
        self._unanswered: dict[int, int] = {}

    def count(self, call: str) -> None:
        """Count a call. All ranks have to make the same calls in the same order."""
        monitor = self._monitor()
        if monitor is not None:
            monitor.record_engine_call(call)

    def wait_for_all(self, call: str) -> None:
        """Count a call and wait until all ranks have made it.

        Raises:
            TrainingError: See `wait_in_call`.
            LostPeerError: See `wait_in_call`.
        """
        self.count(call)
        self.wait_in_call()

    def wait_in_call(self, part: str = "") -> None:
        """Wait until all ranks have reached this point of the call that was counted last.

        Args:
            part: Appended to the call in messages: what a rank does that reaches this point.

        Raises:
            TrainingError: If a rank makes a different call, or has ended.
            LostPeerError: If a rank does not answer.
        """
        monitor = self._monitor()
        store = None if monitor is None else _store_of(monitor)
        if monitor is None or store is None:
            return
        monitor.engine_call += part
        counter = f"{monitor.engine_calls}/{monitor.engine_call}"
        if store.add(counter, 1) == self._world.world_size:
            # All ranks have arrived here, so none still reads the keys of the previous wait.
            for key in _last_keys.pop(monitor, ()):
                store.delete_key(key)
            store.set(f"{counter}/all", "")
        self._unanswered.clear()
        while not _wait_for_key(store, f"{counter}/all"):
            error = self._missing_ranks_error(monitor)
            # The last rank may have arrived, and continued to its next call, during the query.
            if error is not None and not store.check([f"{counter}/all"]):
                raise error
        _last_keys[monitor] = (counter, f"{counter}/all")

    def error_of_ended_ranks(self) -> TrainingError | None:
        """Return the error of a collective that other ranks left out because they have ended.

        Returns:
            None if no rank has ended, or those that have ended report an error of their own.
        """
        monitor = self._monitor()
        if monitor is None or not (ended := monitor.ended_without_error()):
            return None
        return self._other_call_error(monitor, ended)

    def check_failed_everywhere(self, failures: int, problem: BaseException) -> None:
        """Wait until a call that failed on this rank is known to have failed on every rank.

        If this rank continued alone, its collectives would not match those of the others.

        Args:
            failures: Number of calls that have failed on this rank, this one included.
            problem: The error with which the call failed.

        Raises:
            TrainingError: If it has not failed on another rank within `FAILURE_SECONDS`.
        """
        rank, world_size = self._world.rank, self._world.world_size
        if self._world.group is None or world_size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        keys = [f"distmp/failure {failures}/{other}" for other in range(world_size)]
        try:
            store.set(keys[rank], "failed")
            store.wait(keys, timedelta(seconds=FAILURE_SECONDS))
        except RuntimeError as error:  # raised by torch's stores
            raise TrainingError(
                f"the last call of the engine failed on rank {rank} of {world_size} "
                f"({type(problem).__name__}: {problem}) and not on every other rank; ranks that "
                "still wait in it cannot be joined again, so end this rank and start again from a "
                "checkpoint"
            ) from error

    def _monitor(self) -> RankMonitor | None:
        return None if self._world.group is None else rank_monitor.current()

    def _missing_ranks_error(self, monitor: RankMonitor) -> DistmpError | None:
        """Query the status of the other ranks; return an error if one of them cannot arrive."""
        statuses = monitor.query(range(self._world.world_size))
        in_other_call = {
            rank: status
            for rank, status in statuses.items()
            if status is not None and _cannot_arrive(status, monitor)
        }
        if in_other_call:
            return self._other_call_error(monitor, in_other_call)
        silent = [rank for rank, status in statuses.items() if status is None]
        self._unanswered = {rank: self._unanswered.get(rank, 0) + 1 for rank in silent}
        lost = [rank for rank, queries in self._unanswered.items() if queries >= MAX_UNANSWERED]
        if lost := lost or [rank for rank in silent if monitor.has_exited(rank)]:
            return lost_peer_error(
                self._world.rank,
                self._world.world_size,
                f"{lost[0]}{monitor.place(lost[0])}",
                monitor.engine_call,
            )
        return None

    def _other_call_error(
        self, monitor: RankMonitor, others: Mapping[int, RankStatus]
    ) -> TrainingError:
        message = (
            f"rank {self._world.rank} waits in {monitor.engine_call}, which every rank has to "
            f"call, and {monitor.describe(others)}; make the same calls in the same "
            "order on every rank"
        )
        # `sys.exit("...")` looks like a normal end.
        ended = [rank for rank, status in others.items() if status.ended == rank_monitor.ENDED]
        if ended:
            message += f", or see the output of {rank_names(ended)} if it ended with an error"
        return TrainingError(message)


def _cannot_arrive(other: RankStatus, own: RankMonitor) -> bool:
    """Return whether another rank has ended, or makes a different call than this rank."""
    same_number = other.engine_calls == own.engine_calls
    differs = same_number and other.engine_call != own.engine_call
    return bool(other.ended) or other.engine_calls > own.engine_calls or differs


def _wait_for_key(store: Store, key: str) -> bool:
    """Wait for a key up to `PATIENCE_SECONDS`; return whether it exists."""
    try:
        store.wait([key], timedelta(seconds=PATIENCE_SECONDS))
    except RuntimeError as error:
        # A FileStore raises the former, any other store the latter.
        if "timeout" not in str(error).lower() and not isinstance(error, dist.DistStoreError):
            raise
        return store.check([key])
    return True


def _store_of(monitor: RankMonitor) -> Store | None:
    if monitor not in _stores:
        # A separate connection: a wait blocks other threads that use the same one.
        # A new group may use the store of the group that was destroyed before it.
        _stores[monitor] = rank_monitor.open_store(f"roll call {next(_generations)}")
    return _stores[monitor]


_stores: weakref.WeakKeyDictionary[RankMonitor, Store | None] = weakref.WeakKeyDictionary()
_generations = itertools.count()
# Keys of the latest wait, deleted when all ranks have arrived at the next one.
_last_keys: weakref.WeakKeyDictionary[RankMonitor, tuple[str, str]] = weakref.WeakKeyDictionary()
