"""Heartbeats of the launchers of a run, which show each of them which others still run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# Counts the launchers that have joined; with a number, the machine of that launcher.
ROSTER = "distmp/roster"
INTERVAL_SECONDS = 5.0
# A launcher counts as gone after this time without a heartbeat.
_SILENT_SECONDS = 2.5 * INTERVAL_SECONDS


class Beats:
    """Counts heartbeats in the store.

    Args:
        store: The store of the rendezvous.
        number: Number of this launcher in the order of joining, from 1 on.
    """

    def __init__(self, store: Store, number: int) -> None:
        self._store = store
        self._number = number
        # Count of each launcher, and when it was first seen.
        self._seen: dict[int, tuple[int, float]] = {}

    def beat(self) -> None:
        """Send a heartbeat. It blocks while the first machine is silent."""
        self._store.add(_key(self._number), 1)

    def alive(self, launchers: int) -> set[int]:
        """Return the numbers of those of the first `launchers` launchers that still run."""
        now = time.monotonic()
        for number in range(1, launchers + 1):
            count = self._store.add(_key(number), 0)
            if self._seen.get(number, (None,))[0] != count:
                self._seen[number] = (count, now)
        return {n for n, (_, since) in self._seen.items() if now - since < _SILENT_SECONDS}


def running_launchers(store: Store) -> int:
    """Return how many launchers run. This takes longer than one interval.

    Args:
        store: The store of the rendezvous.
    """
    numbers = range(1, store.add(ROSTER, 0) + 1)
    before = {number: store.add(_key(number), 0) for number in numbers}
    time.sleep(1.5 * INTERVAL_SECONDS)
    return sum(store.add(_key(number), 0) > count for number, count in before.items())


def _key(number: int) -> str:
    return f"distmp/beat/{number}"
