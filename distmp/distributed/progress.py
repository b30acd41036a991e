"""What this rank is doing right now: written by its main thread, read by its watchdog.

Writing is one assignment of a tuple, so that it may stand anywhere in a step. The reader's thread
sees an old tuple or a new one, never a mixture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")

# Phases that a profile of steps tells apart.
DATA = "loading data"
DECISION = "decision"
UPDATE = "update"
VALIDATION = "validation"
COMPARISON = "comparison of ranks"
SAVING = "saving a checkpoint"


class CurrentPhase(NamedTuple):
    """Where the main thread is.

    Attributes:
        phase: What it does, in words.
        number: Which one, counted from 1, of what the phase ends with ("microbatch"); 0: no number.
        since: When it came here, on the monotonic clock.
        step: Step under way, 0 before the first one.
        transfers: Whether bytes that the process reads and writes are progress as well.
        starting: Whether no step has ended yet since the process started.
    """

    phase: str
    number: int
    since: float
    step: int
    transfers: bool
    starting: bool

    @property
    def place(self) -> str:
        """The phase with its number."""
        return f"{self.phase} {self.number}" if self.number else self.phase

    def __str__(self) -> str:
        return f"step {self.step}, {self.place}" if self.step else self.place


class Activity:
    """Holds what the main thread is doing.

    Attributes:
        now: The latest entry.
        collective: Name of the collective that distmp has started last.
        observer: Called with every new entry, in the main thread, if there is one.
    """

    def __init__(self) -> None:
        self.observer: Callable[[CurrentPhase], object] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin from nothing, as a new process does."""
        self.now = CurrentPhase("setup", 0, time.monotonic(), 0, False, True)
        self.collective = ""

    def enter(self, phase: str, number: int = 0, *, transfers: bool = False) -> None:
        """Say what is done from now on."""
        before = self.now
        self._is(
            CurrentPhase(phase, number, time.monotonic(), before.step, transfers, before.starting)
        )

    def begin_step(self, step: int, *, first: bool) -> None:
        """Say that a step begins, which starts with loading its data."""
        self._is(CurrentPhase(DATA, 0, time.monotonic(), step, False, first))

    def touch(self) -> None:
        """Say that the same phase goes on and has got further."""
        self.now = self.now._replace(since=time.monotonic())

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, each of which is progress in `phase`."""
        self.enter(phase)
        for item in items:
            self.touch()
            yield item

    def _is(self, doing: CurrentPhase) -> None:
        self.now = doing
        if self.observer is not None:
            self.observer(doing)


activity = Activity()
"""That of this process."""
