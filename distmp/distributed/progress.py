"""The current phase of this rank: written by its main thread, read by its watchdog.

A write is one assignment of a tuple, cheap enough for any place in a step. The reading thread sees
the old tuple or the new one, never a mixture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")

# Phases that other code refers to, such as a profile of steps.
DATA = "loading data"
DECISION = "decision"
UPDATE = "update"
VALIDATION = "validation"
COMPARISON = "comparison of ranks"
SAVING = "saving a checkpoint"


class CurrentPhase(NamedTuple):
    """What the main thread is doing.

    Attributes:
        phase: Name of the phase.
        number: Index, counted from 1, of the item that the phase names last ("forward of
            microbatch"); 0 for a phase without index.
        since: When the phase began or last advanced, in seconds of the monotonic clock.
        step: Index of the current step; 0 before the first one.
        transfers: Whether bytes that the process reads and writes also count as progress.
        starting: Whether no step has ended since the process started.
    """

    phase: str
    number: int
    since: float
    step: int
    transfers: bool
    starting: bool

    @property
    def place(self) -> str:
        """The name of the phase, with its index."""
        return f"{self.phase} {self.number}" if self.number else self.phase

    def __str__(self) -> str:
        return f"step {self.step}, {self.place}" if self.step else self.place


class PhaseTracker:
    """Holds the current phase of the main thread.

    Attributes:
        now: The current phase.
        collective: Name of the collective that distmp started last; "" before the first one.
        observer: Called with every new phase, in the main thread; None for no observer.
    """

    def __init__(self) -> None:
        self.observer: Callable[[CurrentPhase], object] | None = None
        self.restart()

    def restart(self) -> None:
        """Reset to the state of a new process."""
        self.now = CurrentPhase("setup", 0, time.monotonic(), 0, True, True)
        self.collective = ""

    def enter(
        self, phase: str, number: int = 0, *, transfers: bool = False, step: int | None = None
    ) -> None:
        """Enter a phase; the arguments are fields of `CurrentPhase`. `step=None` keeps the step."""
        before = self.now
        step = before.step if step is None else step
        self._set(CurrentPhase(phase, number, time.monotonic(), step, transfers, before.starting))

    def begin_step(self, step: int, *, first: bool) -> None:
        """Enter the first phase of a step, loading data."""
        self._set(CurrentPhase(DATA, 0, time.monotonic(), step, False, first))

    def touch(self) -> None:
        """Record progress within the current phase."""
        self.now = self.now._replace(since=time.monotonic())

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """Enter a phase and yield the items; each of them counts as progress."""
        self.enter(phase)
        for item in items:
            self.touch()
            yield item

    def _set(self, current: CurrentPhase) -> None:
        self.now = current
        if self.observer is not None:
            self.observer(current)


current_phase = PhaseTracker()
"""The current phase of this process."""
