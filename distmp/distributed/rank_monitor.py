"""Finds out where the ranks are that do not come to a decision, or to a call of an engine.

A rank that waits in a decision cannot see why: another rank may be late, somewhere else, or gone.
Each rank has a thread that answers, through the store of the default process group, where the
thread that calls the scaler or the engine is. The waiting ranks ask after `PATIENCE_SECONDS`, and
when the reduction fails. A steady step costs nothing; a rank reads one key a second.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from distmp.utils.frames import collective, user_line, user_line_of_error

# How long a decision may take before the ranks that have not come are named in a warning.
PATIENCE_SECONDS = 60.0
# How often a rank looks whether it is asked.
INTERVAL_SECONDS = 1.0
# How long a rank that lives takes to answer at most.
ANSWER_SECONDS = 5.0
# How long an operation of the store may take.
STORE_SECONDS = 5.0
# How long all ranks of a decision take at most to tell what they have called.
EXCHANGE_SECONDS = 60.0
# Of the error with which a rank has ended, that others see.
MOST_CHARACTERS = 200

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger("distmp")


@dataclass(frozen=True)
class Presence:
    """Where a rank is, as it says itself.

    Attributes:
        begun: How many decisions it has begun, by name of the group.
        last_call: The latest call of a scaler there, in words, or "".
        line: The line of the user's code that it executes, or in which it ended, or "".
        ended: How its process ended, or "".
        engine_calls: How many calls of engines it has begun.
        engine_call: The latest of them, or "".
        waits_in: The collective that it waits in, or "".
        collectives: How many collectives of a sharded model it has begun.
        compares: Whether it compares with other ranks what it is about to do.
    """

    begun: dict[str, int] = field(default_factory=dict)
    last_call: str = ""
    line: str = ""
    ended: str = ""
    engine_calls: int = 0
    engine_call: str = ""
    waits_in: str = ""
    collectives: int = 0
    compares: bool = False

    def __str__(self) -> str:
        last = f"; the last call of its scaler was {self.last_call}" if self.last_call else ""
        if self.engine_call:
            last += f"; the last call of its engine was {self.engine_call}"
        line = f" at {self.line}" if self.line else ""
        return f"{self.ended or 'is'}{line}{last}"


@dataclass
class Waiting:
    """A decision that this rank waits in.

    Attributes:
        group: Name of the group.
        number: Which decision of the group, counted from 1.
        ranks: The ranks of the group.
        is_over: Asks a device whether the decision is over; on a host it is when the call returns.
        since: When it began, on the monotonic clock.
        has_warned: Whether the ranks that have not come were logged.
    """

    group: str
    number: int
    ranks: Sequence[int]
    is_over: Callable[[], bool]
    since: float
    has_warned: bool = False


def _question(number: int) -> str:
    return f"question/{number}"


class RankMonitor:
    """This rank among the ranks of the default process group.

    Args:
        store: Shared by the ranks; this object is its only user on this rank.
        rank: This rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._world = weakref.ref(dist.group.WORLD)
        self._ranks: dict[str, list[int]] = {}
        self._begun: Counter[str] = Counter()
        self._caller = threading.get_ident()
        self._last_call: tuple[str, int] | None = None
        self._waiting: Waiting | None = None
        # How many calls of engines this rank has begun, and the latest of them.
        self.engine_calls = 0
        self.engine_call = ""
        # Of a sharded model, written by `CollectiveOrder`.
        self.collectives = 0
        self.compares = False
        self._answered = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank monitor", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        # Unlike atexit it also runs at the end of processes of `multiprocessing`.
        self._finalizer = Finalize(None, self._leave, exitpriority=0)
        self._store.set(f"process/{self._rank}", json.dumps([_processes_here(), os.getpid()]))
        self._thread.start()

    # What this rank does

    def note(self, method: str, iteration: int) -> None:
        """Note a call of a scaler."""
        self._caller = threading.get_ident()
        self._last_call = (method, iteration)

    def note_engine_call(self, name: str) -> None:
        """Note a call of an engine."""
        self._caller = threading.get_ident()
        self.engine_calls += 1
        self.engine_call = name

    @property
    def last_call(self) -> str:
        """The latest call of a scaler, in words, or ""."""
        method, iteration = self._last_call or ("", 0)
        return f"{method}() in iteration {iteration}" if method else ""

    def begin(self, group: dist.ProcessGroup) -> Waiting:
        """Note the beginning of a decision and return it."""
        name = group.group_name
        if name not in self._ranks:
            self._ranks[name] = dist.get_process_group_ranks(group)
        self._begun[name] += 1
        self._waiting = Waiting(
            name, self._begun[name], self._ranks[name], lambda: False, time.monotonic()
        )
        return self._waiting

    def end(self) -> None:
        """Note that the decision is over."""
        self._waiting = None

    @contextlib.contextmanager
    def announced(self, group: dist.ProcessGroup) -> Iterator[Waiting]:
        """Let other ranks count on this one for the next decision, while in the context."""
        try:
            yield self.begin(group)
        finally:
            self._begun[group.group_name] -= 1
            self.end()

    # What this rank asks

    def absent(self, waiting: Waiting) -> dict[int, Presence | None]:
        """Return the ranks that have not come to a decision; None for a rank without an answer."""
        waiting.has_warned = True
        found = self.ask(waiting.ranks)
        return {
            rank: presence
            for rank, presence in found.items()
            if presence is None or presence.begun.get(waiting.group, 0) < waiting.number
        }

    def is_gone(self, rank: int) -> bool:
        """Whether the process of another rank has ended, as far as this machine can tell."""
        key = f"process/{rank}"
        if not self._store.check([key]):
            return False
        where, process = json.loads(self._store.get(key))
        return where == _processes_here() and not psutil.pid_exists(process)

    def exchange(self, waiting: Waiting, name: str, value: Any) -> dict[int, Any]:
        """Return what each rank says about a decision, as JSON returns it.

        All ranks of the decision have to call it, but not between the same collectives.
        """
        place = f"{name}/{waiting.group}/{waiting.number}"
        self._store.set(f"{place}/{self._rank}", json.dumps(value))
        entries = self._collect(place, waiting.ranks, EXCHANGE_SECONDS)
        if not _store_outlives_ranks():
            # An error may follow, with which the rank that keeps the store ends.
            self._store.set(f"{place}/read/{self._rank}", "true")
            self._collect(f"{place}/read", list(entries), ANSWER_SECONDS)
        return entries

    def ask(self, ranks: Sequence[int]) -> dict[int, Presence | None]:
        """Return where other ranks are, of those named; None for a rank without an answer."""
        ranks = [rank for rank in ranks if rank != self._rank]
        number = self._store.add("questions", 1)
        self._store.set(_question(number), "true")
        answers = self._collect(f"answer/{number}", ranks, ANSWER_SECONDS)
        found: dict[int, Presence | None] = dict.fromkeys(ranks)
        for rank in ranks:
            if rank in answers:
                found[rank] = Presence(**answers[rank])
            elif self._store.check([f"ended/{rank}"]):
                found[rank] = Presence(**json.loads(self._store.get(f"ended/{rank}")))
        return found

    def _collect(self, place: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Return what the ranks have written, waiting until all have or time is up."""
        deadline, pause = time.monotonic() + seconds, 0.001
        missing = set(ranks)
        while True:
            if threading.current_thread() is self._thread:
                self._answer()  # two ranks may ask each other
            missing -= {rank for rank in missing if self._store.check([f"{place}/{rank}"])}
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        there = [rank for rank in ranks if rank not in missing]
        return {rank: json.loads(self._store.get(f"{place}/{rank}")) for rank in there}

    # The thread

    def _run(self) -> None:
        try:
            while not self._stopped.wait(INTERVAL_SECONDS) and self._exists():
                self._answer()
                self._warn()
        except RuntimeError as error:  # torch's errors of a store are such
            logger.debug("the store of the process group is gone: %s", error)
        if not self._stopped.is_set():
            self._finalizer.cancel()

    def _exists(self) -> bool:
        return self._world() is not None and self._world() is dist.group.WORLD

    def _answer(self) -> None:
        while self._store.check([_question(self._answered + 1)]):
            self._answered += 1
            presence = self._presence(user_line(self._caller))
            self._store.set(f"answer/{self._answered}/{self._rank}", json.dumps(asdict(presence)))

    def _presence(self, line: str, ended: str = "") -> Presence:
        return Presence(
            begun=dict(self._begun),
            last_call=self.last_call,
            line=line,
            ended=ended,
            engine_calls=self.engine_calls,
            engine_call=self.engine_call,
            waits_in=collective(sys._current_frames().get(self._caller)),
            collectives=self.collectives,
            compares=self.compares,
        )

    def _warn(self) -> None:
        waiting = self._waiting
        if waiting is None or waiting.has_warned:
            return
        seconds = time.monotonic() - waiting.since
        if seconds < PATIENCE_SECONDS or waiting.is_over():
            return
        absent = self.absent(waiting)
        present = [rank for rank in waiting.ranks if rank not in absent]
        is_over = self._waiting is not waiting or waiting.is_over()
        # Of the ranks that wait one is enough to say so.
        if absent and not is_over and self._rank == present[0]:
            logger.warning(
                "rank %d has waited for %.0f s in %s for other ranks: %s",
                self._rank,
                seconds,
                self.last_call,
                in_words(absent),
            )

    def _leave(self) -> None:
        """End the thread; leave a word for the others where the store outlives this process."""
        self._stopped.set()
        self._thread.join(2 * STORE_SECONDS)
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if not self._exists() or not (error or _store_outlives_ranks()):
            return
        presence = self._presence("", "has ended")
        if error is not None:
            reason = next(iter(str(error).splitlines()), "")
            how = f"has ended with {type(error).__name__} ({reason[:MOST_CHARACTERS]})"
            presence = self._presence(user_line_of_error(error), how)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"ended/{self._rank}", json.dumps(asdict(presence)))


def _processes_here() -> str:
    """Return what tells the processes of this machine, or container, from those of others."""
    space = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"{socket.gethostname()} {space}"


def in_words(absent: Mapping[int, Presence | None]) -> str:
    """Return where the ranks are that have not come."""
    nowhere = (
        "does not answer: its process has ended or is stopped, or it has no scaler or engine yet"
    )
    return "; ".join(f"rank {rank} {presence or nowhere}" for rank, presence in absent.items())


def current() -> RankMonitor | None:
    """Return the one of the default process group, None without other ranks that could answer."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world.size() == 1 or dist.get_backend(world) == "fake":
        return None
    if world not in _of_world:
        _of_world[world] = _start()
    return _of_world[world]


def store_of_its_own(purpose: str) -> Store | None:
    """Return a connection to the default group's store, None if it has no usable one.

    Args:
        purpose: What it is for; one with another purpose has other keys.
    """
    # Here because a torch without distributed has none.
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    try:
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
    except (RuntimeError, NotImplementedError) as error:
        logger.debug("no connection to the store of the process group: %s", error)
        return None
    return PrefixStore(f"distmp/scaler/{purpose}", store)


def _start() -> RankMonitor | None:
    # A group that stands in the place of a destroyed one may have its store.
    store = store_of_its_own(f"rank monitor {next(_generations)}")
    if store is None:
        return None
    rank_monitor = RankMonitor(store, dist.get_rank())
    rank_monitor.start()
    return rank_monitor


def _store_outlives_ranks() -> bool:
    """Whether writing to the store is safe while ranks end: not if one of them keeps it."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return True


# By default process group; None for one whose store cannot be used.
_of_world: weakref.WeakKeyDictionary[dist.ProcessGroup, RankMonitor | None] = (
    weakref.WeakKeyDictionary()
)
_generations = itertools.count()
