"""Decides how long to wait for ranks that may be busy, such as compiling their model.

A limit in seconds of waiting ends healthy jobs: how long a rank compiles or reads data depends on
the model, the machine and the number of ranks. So the limit is a time without progress of all
awaited ranks, because they may wait for each other. A rank makes progress if it executes another
line of the user's code or begins another call or collective, or if it or its child processes use a
processor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from distmp.distributed.rank_monitor import RankStatus

# A rank is busy if it uses a processor for this share of the time. One that polls something, with
# pauses, uses less; on an overloaded machine a busy rank does not get much more.
BUSY_SHARE = 0.01


class AwaitedRanks:
    """Tracks the progress of ranks while this rank waits for them.

    Args:
        seconds: Time without progress of any awaited rank after which `are_stuck` returns True.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: dict[int, _Seen] = {}
        self._progress_at = time.monotonic()

    def are_stuck(self, awaited: Mapping[int, RankStatus | None]) -> bool:
        """Return whether no rank has made progress for the limit.

        Args:
            awaited: The status of the awaited ranks; None for a rank that does not answer.
        """
        now = time.monotonic()
        for rank, status in awaited.items():
            if status is not None and not status.ended:
                seen, self._seen[rank] = self._seen.get(rank), _Seen.of(status, now)
                if seen is None or self._seen[rank].is_progress_since(seen):
                    self._progress_at = now
        return now - self._progress_at > self._seconds


class _Seen(NamedTuple):
    """What a rank did at some time.

    Attributes:
        place: Changes if the rank makes progress.
        busy_seconds: Processor time, see `RankStatus`.
        time: When this rank saw it, in seconds of the monotonic clock.
    """

    place: object
    busy_seconds: float
    time: float

    @classmethod
    def of(cls, status: RankStatus, now: float) -> _Seen:
        place = (status.line, status.waits_in, status.engine_calls, status.collectives)
        # A rank that waits in a collective may poll the device, which is no progress.
        return cls(place, 0.0 if status.waits_in else status.busy_seconds, now)

    def is_progress_since(self, earlier: _Seen) -> bool:
        busy = self.busy_seconds - earlier.busy_seconds
        return self.place != earlier.place or busy > BUSY_SHARE * (self.time - earlier.time)
