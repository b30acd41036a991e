"""Detect ranks that hang or are gone, report which and where, and end the others.

A thread of every rank publishes a heartbeat each second: when the main thread last made progress
(see `distmp.distributed.progress`), and its current phase. The first and the last rank observe all
heartbeats. When no rank has made progress within its limit, one of the two asks every rank for its
state, reports it once, and all ranks end.

A rank whose process is stopped, or whose native code holds the GIL, publishes no heartbeats. Its
last heartbeat shows where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist

from distmp.distributed import flight_recorder
from distmp.distributed.limits import LINK_SECONDS
from distmp.distributed.orphans import is_orphan
from distmp.distributed.progress import PhaseTracker
from distmp.distributed.ranks import describe
from distmp.distributed.reachability import responds, source_address
from distmp.errors import HANG_EXIT_CODE, LOST_PEER_EXIT_CODE, rank_names
from distmp.faults import hang_report, stacks
from distmp.faults.peers import Answer, Ending, Peers, RankPlace, Status, Trace
from distmp.masking import masked_text
from distmp.utils.frames import collective, device_wait

T = TypeVar("T")

INTERVAL_SECONDS = 1.0
# Number of heartbeats within which a rank answers a query, unless it is blocked.
ANSWER_INTERVALS = 4
# Number of heartbeats within which a rank that has answered also writes its flight recorder.
TRACE_INTERVALS = 10
# Time for the main thread to end by itself after the run has failed on another rank.
GRACE_SECONDS = 3.0
# If the thread did not run for this many intervals, the process was stopped.
PAUSE_INTERVALS = 5
# Number of bytes that a process must read or write between two heartbeats to count as progress.
TRANSFER_BYTES = 1 << 16

logger = logging.getLogger("distmp")


class Watchdog:
    """Monitors the ranks of a run in a background thread.

    Args:
        peers: Exchanges messages with the ranks.
        current_phase: The progress of this rank's main thread.
        seconds: Time without progress after which a rank hangs.
        first_seconds: The same until the end of the first step, which compiles and starts up.
        interval_seconds: Time between two heartbeats.
        store_address: Host and port of the store; None if it is in this process.

    Attributes:
        before_exit: Called before the watchdog ends this process; must return soon.
        traces_folder: The folder for the flight recorders of all ranks; None before it is known.
    """

    def __init__(
        self,
        peers: Peers,
        current_phase: PhaseTracker,
        seconds: float,
        first_seconds: float,
        interval_seconds: float = INTERVAL_SECONDS,
        store_address: tuple[str, int] | None = None,
    ) -> None:
        self.peers = peers
        self._activity = current_phase
        self._seconds = seconds
        self._first_seconds = max(seconds, first_seconds)
        self._interval = interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._store_address = store_address
        self._store_unused = threading.Event()
        self._count = 0
        self._last_turn = time.monotonic()
        self._transferred = 0
        self._answered = False
        self._places: dict[int, RankPlace] = {}
        self._suspects: set[int] = set()
        self._observes = peers.rank in (0, peers.world_size - 1)
        self._observer = Observer(seconds)
        self.before_exit: Callable[[], object] = lambda: None
        self.traces_folder: Path | None = None

    def start(self) -> None:
        """Start monitoring."""
        self._activity.restart()
        self._stack = stacks.SharedStack()
        self._beat()
        place = RankPlace(
            socket.gethostname(), os.getpid(), self._stack.descriptor, self._own_address()
        )
        self.peers.introduce(place)
        self._thread.start()
        if self._store_address:
            arguments = (self._store_address,)
            threading.Thread(target=self._watch_store, args=arguments, daemon=True).start()

    def _own_address(self) -> str:
        """Return the address at which other machines reach this one; "" if unknown."""
        if self._store_address is not None:
            with contextlib.suppress(OSError):
                return source_address(self._store_address[0])
        return ""

    def stop(self) -> None:
        """Stop monitoring, and publish that this rank has ended."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._stack.close()
        if not is_orphan():
            with contextlib.suppress(dist.DistError):
                self.peers.leave()
        self._store_unused.set()

    def end_for_lost_ranks(self) -> bool:
        """End the run if a process of this machine has ended without a message."""
        gone = self._gone()
        if not gone:
            return False
        rank = gone[0]
        cause = died(rank, self._places[rank])
        if self.peers.end(Ending(rank, self._activity.now.step, cause, LOST_PEER_EXIT_CODE)):
            print_message(cause)
        return True

    def _gone(self) -> list[int]:
        if not self._places:
            self._places = self.peers.places() or {}
        host = socket.gethostname()
        return [
            rank
            for rank, place in self._places.items()
            if place.host == host and not _is_alive(place.pid) and not self.peers.has_left(rank)
        ]

    def _run(self) -> None:
        try:
            # Without its launcher, this rank ends by itself, and its store may be gone.
            while not self._stopped.wait(self._interval) and not is_orphan():
                self._turn()
        except dist.DistError as error:
            if not self._stopped.is_set() and not is_orphan():
                logger.warning(
                    "lost the launcher's store; ranks are not monitored any more: %s", error
                )

    def _turn(self) -> None:
        self._detect_pause()
        self._detect_transfer()
        self._beat()
        if ending := self.peers.ending():
            self._end_with(ending)
            return
        if self.peers.is_asked():
            self._answer_question()
        self._check_for_lost_ranks()
        if self._observes:
            statuses = self.peers.statuses()
            if self._observer.is_hang(statuses, time.monotonic()):
                self._report_hang()
            self._check_for_lost_machines(statuses)

    def _beat(self) -> None:
        self._count += 1
        doing = self._activity.now
        limit = self._first_seconds if doing.starting else self._seconds
        idle = time.monotonic() - doing.since
        self.peers.beat(Status(self._count, idle, limit, str(doing)))

    def _detect_pause(self) -> None:
        """Restart the limits after the process was stopped: no rank could make progress."""
        now = time.monotonic()
        if now - self._last_turn > PAUSE_INTERVALS * self._interval + PAUSE_INTERVALS:
            self._activity.touch()
            self._observer = Observer(self._seconds)
        self._last_turn = now

    def _detect_transfer(self) -> None:
        if self._activity.now.transfers:
            counters = psutil.Process().io_counters()
            transferred = counters.read_chars + counters.write_chars
            if transferred - self._transferred > TRANSFER_BYTES:
                self._transferred = transferred
                self._activity.touch()

    def _answer_question(self) -> None:
        """Publish the state of this rank, and then its flight recorder, which may block."""
        if self._answered:
            return
        self._answered = True
        self.peers.answer(self._answer())
        self.peers.publish_trace(self._trace())

    def _trace(self) -> Trace:
        """Read the flight recorder of this rank, and write it to a file if it is NCCL's."""
        pending, file, problem = {}, "", ""
        try:
            pending = flight_recorder.pending()
            if flight_recorder.uses_nccl():
                if self.traces_folder is None:
                    problem = "the run has no folder yet"
                else:
                    file = str(flight_recorder.dump(self.traces_folder))
        except Exception as error:  # noqa: BLE001  # the report on the hang must not fail
            problem = " ".join(describe(error).split())
        return Trace(pending, file, problem)

    def _answer(self) -> Answer:
        frame = stacks.main_thread()
        doing = self._activity.now
        return Answer(
            doing=str(doing),
            idle=time.monotonic() - doing.since,
            waits_in=collective(frame),
            synchronizes=device_wait(frame) if torch.cuda.is_initialized() else "",
            collectives=flight_recorder.started(),
            last=self._activity.collective,
            stack=stacks.show(frame),
            host=socket.gethostname(),
        )

    def _check_for_lost_ranks(self) -> None:
        """End the run if a process of this machine is gone in two checks in a row.

        Its own last message, if any, arrives between the two.
        """
        gone = set(self._gone())
        if gone & self._suspects:
            self.end_for_lost_ranks()
        self._suspects = gone

    def _check_for_lost_machines(self, statuses: Mapping[int, Status]) -> None:
        """End the run if a machine is silent, and does not respond to a connection either."""
        silences = self._observer.silences(statuses, time.monotonic())
        silent = {rank: seconds for rank, seconds in silences.items() if seconds > LINK_SECONDS}
        for rank in silent:
            place = self._places.get(rank)
            if place and place.address and not responds(place.address):
                cause = lost_machine(place, ranks_of(place.host, self._places), silent[rank])
                step = self._activity.now.step
                if self.peers.end(Ending(rank, step, cause, LOST_PEER_EXIT_CODE)):
                    print_message(cause)
                    record(cause)
                return

    def _watch_store(self, address: tuple[str, int]) -> None:
        """End this rank if the machine of the store is silent, which blocks the other thread."""
        while not self._store_unused.wait(self._interval):
            silence = time.monotonic() - self._last_turn
            if silence > LINK_SECONDS and not responds(*address):
                cause = (
                    f"the machine of the launcher's store ({address[0]}) has been silent for "
                    f"{silence:.0f} s and does not respond: it is down, or the connection of "
                    f"{socket.gethostname()} to it is cut"
                )
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    print_message(cause)
                    record(cause)
                os._exit(LOST_PEER_EXIT_CODE)

    def _report_hang(self) -> None:
        """Ask every rank for its state, report it once, and end all ranks."""
        peers = self.peers
        statuses = self._observer.until(time.monotonic(), peers.statuses())
        peers.ask()
        self._answer_question()
        answers = self._collect(peers.answers, statuses, ANSWER_INTERVALS)
        traces = self._collect(peers.traces, answers, TRACE_INTERVALS)
        silent = sorted(statuses.keys() - answers.keys())
        self._places = self._places or peers.known_places()
        report = hang_report.report(
            statuses,
            answers,
            {rank: self._inspect(rank) for rank in silent},
            peers.world_size,
            traces,
        )
        step = self._activity.now.step
        ending = Ending(peers.rank, step, report.summary, HANG_EXIT_CODE, silent)
        if peers.end(ending):
            print_message(report.text)
            record(report.summary)
            self._exit(ending)

    def _collect(
        self, read: Callable[[Iterable[int]], dict[int, T]], ranks: Collection[int], intervals: int
    ) -> dict[int, T]:
        """Return the messages of ranks that arrive within a number of heartbeats."""
        found = read(ranks)
        for _ in range(intervals):
            if len(found) == len(ranks):
                break
            time.sleep(self._interval)
            found = read(ranks)
        return found

    def _inspect(self, rank: int) -> hang_report.SilentRank:
        """Inspect the process of a rank that does not answer."""
        place = self._places.get(rank)
        if place is None:
            return hang_report.SilentRank("an unknown machine", 0)
        if place.host != socket.gethostname():
            return hang_report.SilentRank(place.host, place.pid)
        try:
            state: str = psutil.Process(place.pid).status()
        except psutil.NoSuchProcess:
            state = "gone"
        stack = "" if state in ("gone", "stopped") else stacks.of_process(place.pid, place.stack)
        return hang_report.SilentRank(place.host, place.pid, state, stack)

    def _end_with(self, ending: Ending) -> None:
        """Give the main thread time to end by itself, then end the process."""
        if not self._stopped.wait(GRACE_SECONDS):
            self._exit(ending)

    def _exit(self, ending: Ending) -> NoReturn:
        if ending.rank == self.peers.rank:
            # The launcher must see this rank exit before those that it kills.
            time.sleep(self._interval)
        for rank in ending.silent:
            place = self._places.get(rank)
            if place and place.host == socket.gethostname() and rank != self.peers.rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
        own = ending.rank == self.peers.rank
        self.before_exit()
        os._exit(ending.exit_code if own else LOST_PEER_EXIT_CODE)


def died(rank: int, place: RankPlace) -> str:
    """Return a message about a process that ended without one."""
    return (
        f"rank {rank} ended without a message (process {place.pid} on {place.host}): it was "
        "killed, as the kernel does when memory runs out, crashed in native code, or called "
        "os._exit"
    )


def ranks_of(host: str, places: Mapping[int, RankPlace]) -> list[int]:
    """Return the ranks of a machine."""
    return [rank for rank, place in places.items() if place.host == host]


def lost_machine(place: RankPlace, ranks: Collection[int], seconds: float) -> str:
    """Return a message about a machine that does not respond any more."""
    return (
        f"machine {place.host} ({place.address}) with {rank_names(ranks)} has been silent for "
        f"{seconds:.0f} s and does not respond: it is down, or its connection is cut"
    )


def record(cause: str) -> None:
    """Write a cause to torchrun's error file, so that its report names the right rank."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        hint = "see the message of this rank above, after 'distmp:'"
        extra = {"py_callstack": hint, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w") as out:
            json.dump({"message": {"message": cause, "extraInfo": extra}}, out)


def print_message(text: str) -> None:
    """Print a message to standard error in a single write."""
    sys.stderr.write(f"distmp: {masked_text(text)}\n")
    sys.stderr.flush()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


class Observer:
    """Decides from heartbeats whether all ranks hang.

    Args:
        silent_seconds: Limit of every rank once one of them has sent no heartbeat for that long: it
            is stopped, so a longer limit of its phase does not apply.
    """

    def __init__(self, silent_seconds: float = math.inf) -> None:
        self._silent_seconds = silent_seconds
        # Count of the last heartbeat of each rank, and when it was first seen.
        self._seen: dict[int, tuple[int, float]] = {}

    def is_hang(self, statuses: Mapping[int, Status], now: float) -> bool:
        """Return whether every rank is over its limit.

        Ranks wait for each other: while one of them makes progress, the others wait for that one.

        Args:
            statuses: The last heartbeat of each rank that has not left.
            now: Time on this rank's clock; clocks of different ranks are not compared.
        """
        current = self.until(now, statuses)
        silence = max(self.silences(statuses, now).values(), default=0.0)
        most = self._silent_seconds if silence > self._silent_seconds else math.inf
        limits = {rank: min(status.limit, most) for rank, status in current.items()}
        return bool(current) and all(current[rank].idle > limits[rank] for rank in current)

    def until(self, now: float, statuses: Mapping[int, Status]) -> dict[int, Status]:
        """Return heartbeats whose `idle` includes the time since they were first seen.

        A rank that is stopped sends no more of them: its last one says that it has just made
        progress.

        Args:
            now: Time on this rank's clock.
            statuses: The last heartbeat of each rank that has not left.
        """
        for rank, status in statuses.items():
            if self._seen.get(rank, (None,))[0] != status.count:
                self._seen[rank] = (status.count, now)
        silences = self.silences(statuses, now)
        return {
            rank: replace(status, idle=status.idle + silences[rank])
            for rank, status in statuses.items()
        }

    def silences(self, statuses: Mapping[int, Status], now: float) -> dict[int, float]:
        """Return how long each rank has sent no heartbeat, in seconds."""
        return {rank: now - self._seen[rank][1] for rank in statuses if rank in self._seen}
