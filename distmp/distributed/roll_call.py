"""Calls of an engine that need all ranks, and begin only when all ranks have made them.

A rank that evaluates while the others take a step would meet their reductions with one of its own,
which ends the process under gloo and gives nonsense or a hang under NCCL. So a rank says through
the store of the process group that it has come, and waits for the others. When they do not come it
asks where they are. A step itself only counts: it waits for nobody and writes nothing.
"""

from __future__ import annotations

import itertools
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from distmp.distributed import rank_monitor
from distmp.distributed.rank_monitor import Presence, RankMonitor
from distmp.distributed.world import World
from distmp.errors import LostPeerError, TrainingError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# How long ranks may take to come before they are asked where they are, and between two questions.
PATIENCE_SECONDS = 4.0
# A rank that does not answer this many questions in a row, about two minutes, counts as lost.
MOST_QUESTIONS = 12
# How much later than this rank another one may fail in the same call.
FAILURE_SECONDS = 5.0


class RollCall:
    """Counts the calls of engines on this rank, and waits for other ranks where it is called for.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._silent: dict[int, int] = {}

    def count(self, call: str) -> None:
        """Count a call: the ranks make the same ones in the same order."""
        monitor = self._monitor()
        if monitor is not None:
            monitor.note_engine_call(call)

    def meet(self, call: str) -> None:
        """Count a call and wait until all ranks have made it.

        Raises:
            TrainingError: As `meet_in_call`.
            LostPeerError: As `meet_in_call`.
        """
        self.count(call)
        self.meet_in_call()

    def meet_in_call(self, part: str = "") -> None:
        """Wait until all ranks have come to this place in the call that was counted last.

        Args:
            part: What only ranks do that come here, in words behind those of the call.

        Raises:
            TrainingError: If a rank makes another call in its place, or has ended.
            LostPeerError: If a rank does not answer.
        """
        monitor = self._monitor()
        store = None if monitor is None else _store_of(monitor)
        if monitor is None or store is None:
            return
        monitor.engine_call += part
        place = f"{monitor.engine_calls}/{monitor.engine_call}"
        if store.add(place, 1) == self._world.world_size:
            # Everybody has left the meeting before this one.
            for key in _last_meeting.pop(monitor, ()):
                store.delete_key(key)
            store.set(f"{place}/all", "")
        self._silent.clear()
        while not _is_there(store, f"{place}/all"):
            self._look_for_others(monitor)
        _last_meeting[monitor] = (place, f"{place}/all")

    def check_failed_everywhere(self, failures: int, problem: BaseException) -> None:
        """Wait until a call that failed on this rank is known to have failed on every rank.

        A rank that continued alone would meet the collectives of the others with different ones.

        Args:
            failures: Number of calls that have failed on this rank, this one included.
            problem: Why the call has failed.

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
        except RuntimeError as error:  # what torch's stores raise
            raise TrainingError(
                f"the last call of the engine failed on rank {rank} of {world_size} "
                f"({type(problem).__name__}: {problem}) and not on every other rank; ranks that "
                "still wait in it cannot be joined again, so end this rank and start again from a "
                "checkpoint"
            ) from error

    def _monitor(self) -> RankMonitor | None:
        return None if self._world.group is None else rank_monitor.current()

    def _look_for_others(self, monitor: RankMonitor) -> None:
        found = monitor.ask(range(self._world.world_size))
        elsewhere = {
            rank: presence
            for rank, presence in found.items()
            if presence is not None and _will_not_come(presence, monitor)
        }
        if elsewhere:
            raise TrainingError(
                f"rank {self._world.rank} waits in {monitor.engine_call}, "
                f"which every rank has to call, and {rank_monitor.in_words(elsewhere)}; make the "
                "same calls in the same order on every rank"
            )
        silent = [rank for rank, presence in found.items() if presence is None]
        self._silent = {rank: self._silent.get(rank, 0) + 1 for rank in silent}
        gone = [rank for rank, times in self._silent.items() if times >= MOST_QUESTIONS]
        if gone := gone or [rank for rank in silent if monitor.is_gone(rank)]:
            raise LostPeerError(
                f"rank {self._world.rank} of {self._world.world_size} stops because another rank "
                f"has ended; the output of that rank, {gone[0]}, has the cause"
            )


def _will_not_come(presence: Presence, mine: RankMonitor) -> bool:
    """Whether another rank has ended, or is in another call in the place of this one's."""
    here = presence.engine_calls == mine.engine_calls
    elsewhere = here and presence.engine_call != mine.engine_call
    return bool(presence.ended) or presence.engine_calls > mine.engine_calls or elsewhere


def _is_there(store: Store, key: str) -> bool:
    """Wait for a key for a while."""
    try:
        store.wait([key], timedelta(seconds=PATIENCE_SECONDS))
    except RuntimeError as error:
        # Of a store in a file, of any other.
        if "timeout" not in str(error).lower() and not isinstance(error, dist.DistStoreError):
            raise
        return store.check([key])
    return True


def _store_of(monitor: RankMonitor) -> Store | None:
    if monitor not in _stores:
        # Its own connection: to wait on one keeps other threads from using it.
        # A group that stands in the place of a destroyed one may have its store.
        _stores[monitor] = rank_monitor.store_of_its_own(f"roll call {next(_generations)}")
    return _stores[monitor]


_stores: weakref.WeakKeyDictionary[RankMonitor, Store | None] = weakref.WeakKeyDictionary()
_generations = itertools.count()
_last_meeting: weakref.WeakKeyDictionary[RankMonitor, tuple[str, str]] = weakref.WeakKeyDictionary()
