"""Shares what each rank is doing with the other ranks, through the store.

A rank that waits for others cannot see why: another rank may be late, in other code, or dead. So
each rank runs one thread that looks at the store once a second, and answers questions of other
ranks with its `RankStatus`: which line the thread that calls the scaler or the engine executes, and
what it waits for. Waiting ranks ask after `PATIENCE_SECONDS`, and when a reduction fails. A step
adds no communication. The traffic of a rank does not depend on the number of ranks while nobody
asks.

In the trainer, the same thread also ends the run if ranks hang or are gone, see
`distmp.faults.watchdog`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distmp.distributed import flight_recorder
from distmp.distributed.failing_together import lost_peer_error
from distmp.distributed.limits import REJOIN_SECONDS
from distmp.distributed.orphans import is_orphan
from distmp.distributed.progress import current_phase
from distmp.distributed.rendezvous_store import CONNECT_SECONDS
from distmp.errors import DistmpError, LostPeerError
from distmp.utils.frames import collective, device_wait, stack_text, user_line, working_frame
from distmp.utils.processes import ProcessIdentity, child_seconds, thread_seconds

# How long a decision may take before a warning names the missing ranks.
PATIENCE_SECONDS = 60.0
# How often a rank checks for questions.
INTERVAL_SECONDS = 1.0
# Longest time that a live rank takes to answer.
ANSWER_SECONDS = 5.0
# Time for the thread to end.
END_SECONDS = 10.0
# A rank that does not answer this many queries in a row, about two minutes, counts as lost.
MAX_UNANSWERED = 15
# Timeout of `RankMonitor.exchange`.
EXCHANGE_SECONDS = 60.0
# Number of an answer to any later question.
_ANY_QUESTION = 1 << 60
_NO_ANSWER = (
    "does not answer: its process has ended or is stopped, or it has no scaler or engine yet"
)

logger = logging.getLogger("distmp")


@dataclass
class RankStatus:
    """What a rank is doing, as it reports itself.

    Its main thread is the one that calls the scaler or the engine.

    Attributes:
        decisions: Number of decisions that the rank has begun, by name of the process group.
        last_call: Latest call of a scaler, as text; "" before the first one.
        line: Line of the user's code that the main thread executes; "" if unknown.
        engine_calls: Number of calls of engines that the rank has begun.
        engine_call: Latest call of an engine, as text; "" before the first one.
        waits_in: The collective or roll call that the main thread waits in, or "".
        synchronizes: The call in which the host waits for the device, or "".
        collectives: Number of collectives of a sharded model that the rank has begun.
        comparison: Name of the latest comparison of its next collective with that of other ranks.
        compares: The collective that it compares there, as text; "" after the comparison.
        busy_seconds: Processor time of the main thread.
        child_seconds: Processor time of the child processes, which may compile.
        doing: The current phase as text.
        idle: Seconds since the main thread last made progress.
        started: Number of collectives that the rank has started, by process group, see
            `flight_recorder.started`.
        last_started: Name of the collective that distmp started last; "" before the first one.
        stack: The stack of the main thread, with the innermost call last.
        host: Name of the machine.
    """

    decisions: dict[str, int] = field(default_factory=dict)
    last_call: str = ""
    line: str = ""
    engine_calls: int = 0
    engine_call: str = ""
    waits_in: str = ""
    synchronizes: str = ""
    collectives: int = 0
    comparison: str = ""
    compares: str = ""
    busy_seconds: float = 0.0
    child_seconds: float = 0.0
    doing: str = ""
    idle: float = 0.0
    started: dict[str, int] = field(default_factory=dict)
    last_started: str = ""
    stack: str = ""
    host: str = ""

    def __str__(self) -> str:
        last = f"; the last call of its scaler was {self.last_call}" if self.last_call else ""
        if self.engine_call:
            last += f"; the last call of its engine was {self.engine_call}"
        line = f" at {self.line}" if self.line else ""
        return f"is{line}{last}"


class RankProcess(NamedTuple):
    """The process of a rank.

    Attributes:
        host: Name of its machine.
        identity: The process.
        address: The address at which other machines reach its machine; "" if unknown.
    """

    host: str
    identity: ProcessIdentity
    address: str = ""


# The status of ranks; None for a rank that does not answer.
Statuses = Mapping[int, RankStatus | None]


@dataclass
class PendingDecision:
    """A decision that this rank has begun and that may still wait for other ranks.

    Attributes:
        group: Name of the process group.
        number: Index of the decision in the group, counted from 1.
        ranks: The global ranks of the group.
        since: When the decision began, in seconds of the monotonic clock.
        is_over: Returns whether the device has completed the decision. A decision on the CPU is
            over when the reduction returns.
        has_warned: Whether the missing ranks were logged.
    """

    group: str
    number: int
    ranks: Sequence[int]
    since: float
    is_over: Callable[[], bool] = lambda: False
    has_warned: bool = False


# Returns the error if a rank cannot reach a point, from the status of each rank.
Problem = Callable[[Statuses], DistmpError | None]


class RankMonitor:
    """Reports the status of this rank to the other ranks, and queries theirs.

    Args:
        store: Store shared by the ranks; nothing else on this rank uses this connection.
        rank: This rank in the default process group.
        world_size: Number of ranks.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        process: The process of this rank.
        own: The recorded fields of this rank's status; `status` adds those that it observes.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self.process = RankProcess(socket.gethostname(), ProcessIdentity.of_this_process())
        self._phase = current_phase
        self._interval = INTERVAL_SECONDS  # between two heartbeats
        self._group: Callable[[], dist.ProcessGroup | None] | None = None
        self._processes: dict[int, RankProcess] = {}
        self._ranks: dict[str, list[int]] = {}
        self._caller = threading.get_ident()
        self._pending: PendingDecision | None = None
        # When the latest call of an engine began; infinite after a warning about it.
        self._called_at = math.inf
        self.own = RankStatus(host=self.process.host)
        # Keys of the latest point, deleted when all ranks have reached the next one.
        self._last_point: tuple[str, ...] = ()
        self._answered = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank monitor", daemon=True)

    def start(self, group: dist.ProcessGroup | None = None) -> None:
        """Publish the process of this rank and start the thread that answers questions.

        Args:
            group: The thread ends when this group is not the default group any more, or with the
                process; None for a monitor that is stopped explicitly.
        """
        if group is not None:
            self._group = weakref.ref(group)
            # Runs before the process group is destroyed, which was registered before.
            atexit.register(self.stop)
        self._put(f"process/{self.rank}", self.process)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)

    # Recording what this rank does

    def record_call(self, method: str, iteration: int) -> None:
        """Record a call of a scaler."""
        self._caller = threading.get_ident()
        self.own.last_call = f"{method}() in iteration {iteration}"

    def record_engine_call(self, name: str) -> None:
        """Record a call of an engine."""
        self._caller = threading.get_ident()
        self._called_at = time.monotonic()
        self.own.engine_calls += 1
        self.own.engine_call = name

    def begin(self, group: dist.ProcessGroup) -> PendingDecision:
        """Record the beginning of a decision and return it."""
        name = group.group_name
        if name not in self._ranks:
            self._ranks[name] = dist.get_process_group_ranks(group)
        number = self.own.decisions[name] = self.own.decisions.get(name, 0) + 1
        self._pending = PendingDecision(name, number, self._ranks[name], time.monotonic())
        return self._pending

    def end(self) -> None:
        """Record that the decision is over."""
        self._pending = None

    # Querying other ranks

    def missing(self, decision: PendingDecision) -> dict[int, RankStatus | None]:
        """Return the ranks that have not begun a decision; None for a rank that does not answer."""
        decision.has_warned = True
        statuses = self.query(decision.ranks)
        return {
            rank: status
            for rank, status in statuses.items()
            if status is None or status.decisions.get(decision.group, 0) < decision.number
        }

    def process_of(self, rank: int) -> RankProcess | None:
        """Return the process of another rank; None if it has not started its monitor."""
        if rank not in self._processes and (stored := self._read(f"process/{rank}")):
            host, identity, *rest = stored
            self._processes[rank] = RankProcess(host, ProcessIdentity(*identity), *rest)
        return self._processes.get(rank)

    def has_exited(self, rank: int) -> bool:
        """Return whether the process of another rank has ended; False for other machines."""
        process = self.process_of(rank)
        return process is not None and process.identity.has_ended()

    def place(self, rank: int) -> str:
        """Return " on MACHINE" for another rank; "" if it has not started its monitor."""
        with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
            if process := self.process_of(rank):
                return f" on {process.host}"
        return ""

    def describe(self, statuses: Statuses) -> str:
        """Return the status of ranks as text."""
        return "; ".join(
            f"rank {rank} {status}" if status else f"rank {rank}{self.place(rank)} {_NO_ANSWER}"
            for rank, status in statuses.items()
        )

    def meet(self, point: str, problem: Problem, patience_seconds: float) -> None:
        """Wait until all ranks have reached a point of the program.

        Args:
            point: Name of the point, used once. All ranks reach the same points in order.
            problem: Returns the error if a rank cannot reach it, from the status of each rank;
                called repeatedly while ranks are missing.
            patience_seconds: Seconds until the status of the others is queried, and between two
                queries.

        Raises:
            DistmpError: What `problem` returns.
            LostPeerError: If a rank has ended or does not answer.
        """
        all_key = f"{point}/all"
        if self._store.add(point, 1) == self.world_size:
            # All ranks are here, so none still reads the keys of the previous point.
            for key in self._last_point:
                self._store.delete_key(key)
            self._store.set(all_key, "")
        self.own.waits_in = f"a roll call ({point})"
        try:
            self._wait_for_all(all_key, problem, patience_seconds)
        finally:
            self.own.waits_in = ""
        self._last_point = (point, all_key)

    def _wait_for_all(self, key: str, problem: Problem, patience_seconds: float) -> None:
        pause, ask_at = 1e-4, time.monotonic() + patience_seconds
        unanswered: Counter[int] = Counter()
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if time.monotonic() < ask_at:
                continue
            statuses = self.query(range(self.world_size))
            error = problem(statuses) or self._lost_rank(statuses, unanswered)
            # The last rank may have arrived, and continued to its next call, during the query.
            if error is not None and not self._store.check([key]):
                # This rank may end before it is asked, and the others should raise the same error.
                self.publish("answer", asdict(self.status()), _ANY_QUESTION)
                raise error
            ask_at = time.monotonic() + patience_seconds

    def _lost_rank(self, statuses: Statuses, unanswered: Counter[int]) -> LostPeerError | None:
        """Return the error if a rank has ended, or has not answered many queries in a row."""
        silent = [rank for rank, status in statuses.items() if status is None]
        for rank in statuses:
            unanswered[rank] = unanswered[rank] + 1 if rank in silent else 0
        lost = [rank for rank in silent if unanswered[rank] >= MAX_UNANSWERED]
        if lost := lost or [rank for rank in silent if self.has_exited(rank)]:
            place = f"{lost[0]}{self.place(lost[0])}"
            return lost_peer_error(self.rank, self.world_size, place, self.own.engine_call)
        return None

    def exchange(self, decision: PendingDecision, name: str, value: Any) -> dict[int, Any]:
        """Gather a value from each rank of a decision, through the store.

        All ranks of the decision have to call it, but not between the same collectives.

        Args:
            decision: The decision that the values belong to.
            name: Distinguishes exchanges of the same decision.
            value: Anything that JSON can represent.

        Returns:
            The values by rank, without ranks that have not called this within `EXCHANGE_SECONDS`.
        """
        key = f"{name}/{decision.group}/{decision.number}"
        self.publish(key, value)
        entries = self.collect(key, decision.ranks, EXCHANGE_SECONDS)
        # The values may lead to an error that ends the rank which hosts the store.
        self.publish(f"{key}/read", True)
        self.collect(f"{key}/read", list(entries), ANSWER_SECONDS)
        return entries

    def query(
        self, ranks: Sequence[int], seconds: float = ANSWER_SECONDS
    ) -> dict[int, RankStatus | None]:
        """Return the status of other ranks; None for a rank that does not answer in time."""
        ranks = [rank for rank in ranks if rank != self.rank]
        number = self._store.add("questions", 1)
        answers = self.collect("answer", ranks, seconds, number)
        return {rank: RankStatus(**answers[rank]) if rank in answers else None for rank in ranks}

    # The store

    def publish(self, key: str, value: Any, number: int = 0) -> None:
        """Store a value of this rank for `collect`; the latest number counts."""
        self._put(f"{key}/{self.rank}", [number, value])

    def collect(
        self, key: str, ranks: Sequence[int], seconds: float, number: int = 0
    ) -> dict[int, Any]:
        """Return what ranks publish under `key` with at least `number`; wait up to `seconds`."""
        deadline, pause = time.monotonic() + seconds, 0.001
        found: dict[int, Any] = {}
        while True:
            if threading.current_thread() is self._thread:
                self._answer()  # two ranks may query each other
            for rank in ranks:
                entry = None if rank in found else self._read(f"{key}/{rank}")
                if entry is not None and entry[0] >= number:
                    found[rank] = entry[1]
            if len(found) == len(ranks) or time.monotonic() > deadline:
                return {rank: found[rank] for rank in ranks if rank in found}
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _read(self, key: str) -> Any:
        """Return the value of a key; None if it does not exist."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    # The thread

    def _run(self) -> None:
        try:
            # Without its launcher, this rank ends by itself, and its store may be gone.
            while not self._stopped.wait(self._interval) and not is_orphan():
                if not self._is_of_default_group():
                    atexit.unregister(self.stop)  # it would keep the connection to the store
                    break
                self._turn()
        except RuntimeError as error:  # raised by torch's stores
            self._lost_store(error)

    def _turn(self) -> None:
        self._answer()
        self._warn()

    def _lost_store(self, error: RuntimeError) -> None:
        logger.debug("cannot reach the store of the process group: %s", error)

    def _is_of_default_group(self) -> bool:
        """Return whether the group of this monitor is the default group; True without a group."""
        return self._group is None or (
            self._group() is not None and self._group() is dist.group.WORLD
        )

    def _answer(self) -> None:
        """Answer the latest question, if there is a new one."""
        # One counter: a rank that asks may end between two writes.
        latest = self._read("questions") or 0
        if latest > self._answered:
            self._answered = latest
            self.publish("answer", asdict(self.status()), latest)

    def status(self) -> RankStatus:
        """Return what this rank is doing."""
        frame = working_frame(self._caller)
        phase = self._phase.now
        return replace(
            self.own,
            decisions=dict(self.own.decisions),
            line=user_line(self._caller),
            waits_in=collective(frame) or self.own.waits_in,
            synchronizes=device_wait(frame) if torch.cuda.is_initialized() else "",
            busy_seconds=thread_seconds(self._caller),
            child_seconds=child_seconds(),
            doing=str(phase),
            idle=time.monotonic() - phase.since,
            started=flight_recorder.started(),
            last_started=self._phase.collective,
            stack=stack_text(frame),
        )

    def _warn(self) -> None:
        """Log once that a call of an engine, or a decision of a scaler, waits for other ranks."""
        seconds = time.monotonic() - max(self._called_at, self._phase.now.since)
        if seconds > PATIENCE_SECONDS and "distmp/" in collective(working_frame(self._caller)):
            self._called_at, calls = math.inf, self.own.engine_calls
            statuses = self.query(range(self.world_size))
            late = {
                rank: status
                for rank, status in statuses.items()
                if status is None or status.engine_calls < calls or not status.waits_in
            }
            self._log_late(seconds, self.own.engine_call, late, range(self.world_size))
        decision = self._pending
        if decision is None or decision.has_warned:
            return
        seconds = time.monotonic() - decision.since
        if seconds < PATIENCE_SECONDS or decision.is_over():
            return
        missing = self.missing(decision)
        if self._pending is decision and not decision.is_over():
            self._log_late(seconds, self.own.last_call, missing, decision.ranks)

    def _log_late(self, seconds: float, call: str, late: Statuses, ranks: Sequence[int]) -> None:
        # Only the first of the waiting ranks logs the warning.
        if late and self.rank == min(set(ranks) - set(late)):
            logger.warning(
                "rank %d has waited for %.0f s in %s for other ranks: %s",
                self.rank,
                seconds,
                call,
                self.describe(late),
            )


def current() -> RankMonitor | None:
    """Return the monitor of this rank; None if no other rank could answer.

    This is the monitor passed to `use`, or else one started for the default process group.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1 or dist.get_backend(world) == "fake":
        return None
    if _of_job is not None:
        return _of_job
    if world not in _monitors:
        _monitors[world] = None
        if (store := open_store("rank monitor")) is not None:
            _monitors[world] = monitor = RankMonitor(store, dist.get_rank(), world.size())
            monitor.start(world)
    return _monitors[world]


def use(monitor: RankMonitor | None) -> None:
    """Make `current` return this monitor, which all ranks have started; None reverts that."""
    global _of_job
    _of_job = monitor


def open_store(purpose: str) -> Store | None:
    """Return a new connection to the store of the default group; None if it cannot be used.

    Args:
        purpose: Prefix of the keys, so that users of the store do not share them. All ranks open it
            equally often while the store exists.
    """
    try:
        connected = dist.distributed_c10d._get_default_store()
        # Fails at once if the rank that hosts the store has ended; a new connection would wait.
        connected.check(["host"])
        timeout = connected.timeout  # type: ignore[attr-defined]
        connected.set_timeout(timedelta(seconds=CONNECT_SECONDS))  # the host may end at this point
        try:
            store = connected.clone()  # type: ignore[attr-defined]
        finally:
            connected.set_timeout(timeout)
        store.set_timeout(timedelta(seconds=REJOIN_SECONDS))
        # A new group may use the store of the group that was destroyed before it.
        number = store.add(f"distmp/{purpose} of rank {dist.get_rank()}", 1)
    except (RuntimeError, NotImplementedError) as error:
        logger.debug("no connection to the store of the process group: %s", error)
        return None
    return PrefixStore(f"distmp/scaler/{purpose} {number}", store)


# By default process group; None where its store cannot be used.
_monitors: weakref.WeakKeyDictionary[dist.ProcessGroup, RankMonitor | None] = (
    weakref.WeakKeyDictionary()
)
_of_job: RankMonitor | None = None
