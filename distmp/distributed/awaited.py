"""Decides how long to wait for ranks that may be busy, such as compiling their model.

A fixed limit on waiting would end healthy jobs: how long a rank compiles or reads data depends on
the model, the machine and the number of ranks. So the limit is a time in which no awaited rank
makes progress; one rank is enough, because the others may wait for it. A rank makes progress if it
executes another line of the user's code or begins another call or collective, or if it or its child
processes use a processor.

An endless loop looks the same. So there is a second, much longer limit, which only another call of
an engine or another collective extends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from distmp.distributed.rank_monitor import RankStatus

# A rank is busy if it uses a processor for this share of the time. One that polls something, with
# pauses, uses less; on an overloaded machine a busy rank does not get much more.
BUSY_SHARE = 0.01
# The same for child processes. Services that record or monitor the run use less.
CHILD_SHARE = 0.2
# How many times longer a rank may be busy without beginning a call or a collective.
BUSY_LIMITS = 30


class AwaitedRanks:
    """Tracks the progress of ranks while this rank waits for them.

    Args:
        seconds: Time without progress of any awaited rank after which they are stuck. They are also
            stuck after `BUSY_LIMITS` times as long without a call of an engine or a collective.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # The latest status of each rank, and when this rank saw it.
        self._seen: dict[int, tuple[RankStatus, float]] = {}
        self._progress_at = self._call_at = time.monotonic()

    def why_stuck(self, awaited: Mapping[int, RankStatus | None]) -> str:
        """Return why the ranks are stuck, as text; "" while they may continue.

        Args:
            awaited: The status of the awaited ranks; None for a rank that does not answer.
        """
        now = time.monotonic()
        for rank, status in awaited.items():
            if status is not None:
                before, since = self._seen.get(rank, (None, now))
                self._seen[rank] = (status, now)
                if before is None or _calls(before) != _calls(status):
                    self._progress_at = self._call_at = now
                elif _is_busy(before, status, now - since):
                    self._progress_at = now
        if now - self._progress_at > self._seconds:
            return f"made no progress for {self._seconds:g} s"
        if now - self._call_at > BUSY_LIMITS * self._seconds:
            return f"been busy without a call of the engine for {BUSY_LIMITS * self._seconds:g} s"
        return ""


def _calls(status: RankStatus) -> tuple[int, int]:
    return status.engine_calls, status.collectives


def _is_busy(before: RankStatus, after: RankStatus, seconds: float) -> bool:
    if (before.line, before.waits_in) != (after.line, after.waits_in):
        return True
    if after.waits_in:  # it may poll the device, which is no progress
        return False
    return (
        after.busy_seconds - before.busy_seconds > BUSY_SHARE * seconds
        or after.child_seconds - before.child_seconds > CHILD_SHARE * seconds
    )
