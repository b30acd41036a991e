"""Delays collective calls of an engine until all ranks have made them.

If a rank evaluates while the others take a step, its reduction is matched with a different
reduction, which aborts the process under gloo and gives wrong results or a hang under NCCL. So a
rank announces the call through the store of the process group and waits for the others. If they do
not arrive, it queries their status. A step is only counted: it neither waits nor writes.
"""

from __future__ import annotations

from functools import partial

from distmp.distributed import rank_monitor
from distmp.distributed.rank_monitor import RankMonitor, Statuses
from distmp.distributed.world import World
from distmp.errors import DistmpError, TrainingError

# How long ranks wait before they query the status of missing ranks, and between two queries.
PATIENCE_SECONDS = 4.0
# How much later than this rank another one may fail in the same call.
FAILURE_SECONDS = 5.0
# In the message of a collective of gloo that has waited for another rank.
TIMED_OUT = "Timed out waiting"


class RollCall:
    """Counts the calls of engines on this rank, and waits until all ranks have made a call.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def count(self, call: str) -> None:
        """Count a call. All ranks have to make the same calls in the same order."""
        if (monitor := self._monitor()) is not None:
            monitor.record_engine_call(call)

    def wait_for_all(self, call: str) -> None:
        """Count a call and wait until all ranks have made it.

        Raises:
            TrainingError: If a rank makes a different call.
            LostPeerError: If a rank has ended or does not answer.
        """
        self.count(call)
        if (monitor := self._monitor()) is not None:
            call = f"{monitor.own.engine_calls}/{monitor.own.engine_call}"
            monitor.meet(call, partial(_other_call_error, monitor), PATIENCE_SECONDS)

    def explain_timeout(self, error: BaseException) -> None:
        """Name the ranks that the latest call has waited for in a collective until its timeout.

        Raises:
            TrainingError: In place of the error of the collective.
        """
        is_timeout = TIMED_OUT in str(error) and not isinstance(error, DistmpError)
        if is_timeout and (monitor := self._monitor()) is not None:
            others = monitor.describe(monitor.query(range(monitor.world_size)))
            raise TrainingError(
                f"rank {monitor.rank} has waited in {monitor.own.engine_call} until the timeout of "
                f"the process group for other ranks: {others}; make the same calls in the same "
                "order on every rank, or pass a longer timeout to init_process_group"
            ) from error

    def check_failed_everywhere(self, reached: str, problem: BaseException) -> None:
        """Wait until a call that failed on this rank is known to have failed on every rank.

        If this rank continued alone, its collectives would not match those of the others.

        Args:
            reached: Number of calls that have failed on this rank, this one included, and how far
                this one came. Ranks continue only if it is the same on all of them.
            problem: The error with which the call failed.

        Raises:
            TrainingError: If it has not failed on another rank within `FAILURE_SECONDS`.
        """
        error = TrainingError(
            f"the last call of the engine failed on rank {self._world.rank} of "
            f"{self._world.world_size} ({type(problem).__name__}: {problem}) and not at "
            "the same point on every other rank; ranks that still wait in it cannot be joined "
            "again, so end this rank and start again from a checkpoint"
        )
        if (monitor := self._monitor()) is not None:
            monitor.meet(f"failure {reached}", lambda statuses: error, FAILURE_SECONDS)

    def _monitor(self) -> RankMonitor | None:
        return None if self._world.group is None else rank_monitor.current()


def _other_call_error(monitor: RankMonitor, statuses: Statuses) -> TrainingError | None:
    """Return the error if another rank makes a different call than this rank."""
    own = monitor.own
    others = {
        rank: status
        for rank, status in statuses.items()
        if status is not None
        and status.engine_calls >= own.engine_calls
        and (status.engine_calls, status.engine_call) != (own.engine_calls, own.engine_call)
    }
    if not others:
        return None
    return TrainingError(
        f"rank {monitor.rank} waits in {own.engine_call}, which every rank has to call, "
        f"and {monitor.describe(others)}; make the same calls in the same order on every rank"
    )
