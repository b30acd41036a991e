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
from typing import NamedTuple

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
        self._seen: dict[int, _Seen] = {}
        self._progress_at = self._call_at = time.monotonic()

    def why_stuck(self, awaited: Mapping[int, RankStatus | None]) -> str:
        """Return why the ranks are stuck, as text; "" while they may continue.

        Args:
            awaited: The status of the awaited ranks; None for a rank that does not answer.
        """
        now = time.monotonic()
        for rank, status in awaited.items():
            if status is not None:
                seen, self._seen[rank] = self._seen.get(rank), _Seen.of(status, now)
                if seen is None or self._seen[rank].is_progress_since(seen):
                    self._progress_at = now
                if seen is None or self._seen[rank].calls != seen.calls:
                    self._call_at = now
        if now - self._progress_at > self._seconds:
            return f"made no progress for {self._seconds:g} s"
        if now - self._call_at > BUSY_LIMITS * self._seconds:
            return f"been busy without a call of the engine for {BUSY_LIMITS * self._seconds:g} s"
        return ""


class _Seen(NamedTuple):
    """What a rank did at some time.

    Attributes:
        calls: Numbers of calls and collectives that the rank has begun.
        place: Where the rank is; changes if it makes progress.
        busy_seconds: Processor time, see `RankStatus`.
        child_seconds: Processor time of child processes.
        time: When this rank saw it, in seconds of the monotonic clock.
    """

    calls: tuple[int, int]
    place: tuple[str, str]
    busy_seconds: float
    child_seconds: float
    time: float

    @classmethod
    def of(cls, status: RankStatus, now: float) -> _Seen:
        calls = (status.engine_calls, status.collectives)
        # A rank that waits in a collective may poll the device, which is no progress.
        waits = bool(status.waits_in)
        busy = (0.0, 0.0) if waits else (status.busy_seconds, status.child_seconds)
        return cls(calls, (status.line, status.waits_in), *busy, now)

    def is_progress_since(self, earlier: _Seen) -> bool:
        seconds = self.time - earlier.time
        return (
            (self.calls, self.place) != (earlier.calls, earlier.place)
            or self.busy_seconds - earlier.busy_seconds > BUSY_SHARE * seconds
            or self.child_seconds - earlier.child_seconds > CHILD_SHARE * seconds
        )
