"""Waits until all ranks have come to the same point, or raises an error if one cannot come.

If a rank evaluates while the others take a step, its reduction is matched with a different
reduction, which aborts the process under gloo and gives wrong results or a hang under NCCL. So a
rank announces the call through the store of the process group and waits for the others. If they do
not arrive, it queries their status. A step is only counted: it neither waits nor writes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from distmp.distributed import rank_monitor
from distmp.distributed.lost_peers import lost_peer_error
from distmp.distributed.rank_monitor import RankMonitor, RankStatus
from distmp.distributed.world import World
from distmp.errors import DistmpError, LostPeerError, TrainingError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# How long ranks wait before they query the status of missing ranks, and between two queries.
PATIENCE_SECONDS = 4.0
# A rank that does not answer this many queries in a row, about two minutes, counts as lost.
MAX_UNANSWERED = 12
# How much later than this rank another one may fail in the same call.
FAILURE_SECONDS = 5.0

Statuses = Mapping[int, RankStatus | None]


class RollCall:
    """Counts the calls of engines on this rank, and waits until all ranks have made a call.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # Consecutive queries that a rank has not answered, by rank.
        self._unanswered: dict[int, int] = {}

    @property
    def monitor(self) -> RankMonitor | None:
        """The monitor of this rank; None for a single process, and if ranks cannot be queried."""
        return None if self._world.group is None else rank_monitor.current()

    def count(self, call: str) -> None:
        """Count a call. All ranks have to make the same calls in the same order."""
        if (monitor := self.monitor) is not None:
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
            TrainingError: If a rank makes a different call.
            LostPeerError: If a rank has ended or does not answer.
        """
        if (monitor := self.monitor) is not None:
            monitor.own.engine_call += part
            call = f"{monitor.own.engine_calls}/{monitor.own.engine_call}"
            self.meet(call, self._other_call_error)

    def meet(
        self,
        point: str,
        problem: Callable[[RankMonitor, Statuses], DistmpError | None],
        patience_seconds: float | None = None,
    ) -> None:
        """Wait until all ranks have come to a point of the program.

        Args:
            point: Name of the point, used once. All ranks come to the same points in order.
            problem: Returns the error if a rank cannot come, from the status of other ranks; called
                repeatedly while ranks are missing.
            patience_seconds: Seconds between two calls of `problem`; None: `PATIENCE_SECONDS`.

        Raises:
            DistmpError: What `problem` returns.
            LostPeerError: If a rank has ended or does not answer.
        """
        monitor = self.monitor
        store = None if monitor is None else _store_of(monitor)
        if monitor is None or store is None:
            return
        if store.add(point, 1) == self._world.world_size:
            # All ranks have arrived here, so none still reads the keys of the previous point.
            for key in _last_keys.pop(monitor, ()):
                store.delete_key(key)
            store.set(f"{point}/all", "")
        self._unanswered.clear()
        while not _wait_for_key(store, f"{point}/all", patience_seconds or PATIENCE_SECONDS):
            statuses = monitor.query(range(self._world.world_size))
            error = problem(monitor, statuses) or self._lost_rank_error(monitor, statuses)
            # The last rank may have arrived, and continued to its next call, during the query.
            if error is not None and not store.check([f"{point}/all"]):
                raise error
        _last_keys[monitor] = (point, f"{point}/all")

    def check_failed_everywhere(self, failures: int, problem: BaseException) -> None:
        """Wait until a call that failed on this rank is known to have failed on every rank.

        If this rank continued alone, its collectives would not match those of the others.

        Args:
            failures: Number of calls that have failed on this rank, this one included.
            problem: The error with which the call failed.

        Raises:
            TrainingError: If it has not failed on another rank within `FAILURE_SECONDS`.
        """
        error = TrainingError(
            f"the last call of the engine failed on rank {self._world.rank} of "
            f"{self._world.world_size} ({type(problem).__name__}: {problem}) and not on every "
            "other rank; ranks that still wait in it cannot be joined again, so end this rank and "
            "start again from a checkpoint"
        )
        self.meet(f"failure {failures}", lambda monitor, statuses: error, FAILURE_SECONDS)

    def _other_call_error(self, monitor: RankMonitor, statuses: Statuses) -> TrainingError | None:
        """Return the error if another rank makes a different call than this rank."""
        others = {
            rank: status
            for rank, status in statuses.items()
            if status is not None and _is_in_other_call(status, monitor.own)
        }
        if not others:
            return None
        return TrainingError(
            f"rank {self._world.rank} waits in {monitor.own.engine_call}, which every rank has to "
            f"call, and {monitor.describe(others)}; make the same calls in the same "
            "order on every rank"
        )

    def _lost_rank_error(self, monitor: RankMonitor, statuses: Statuses) -> LostPeerError | None:
        silent = [rank for rank, status in statuses.items() if status is None]
        self._unanswered = {rank: self._unanswered.get(rank, 0) + 1 for rank in silent}
        lost = [rank for rank, queries in self._unanswered.items() if queries >= MAX_UNANSWERED]
        if lost := lost or [rank for rank in silent if monitor.has_exited(rank)]:
            rank, world_size = self._world.rank, self._world.world_size
            place = f"{lost[0]}{monitor.place(lost[0])}"
            return lost_peer_error(rank, world_size, place, monitor.own.engine_call)
        return None


def _is_in_other_call(other: RankStatus, own: RankStatus) -> bool:
    if other.engine_calls == own.engine_calls:
        return other.engine_call != own.engine_call
    return other.engine_calls > own.engine_calls


def _wait_for_key(store: Store, key: str, seconds: float) -> bool:
    """Wait for a key; return whether it exists."""
    try:
        store.wait([key], timedelta(seconds=seconds))
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
# Keys of the latest point, deleted when all ranks have arrived at the next one.
_last_keys: weakref.WeakKeyDictionary[RankMonitor, tuple[str, str]] = weakref.WeakKeyDictionary()
