"""Detect ranks that hang or are gone, report which and where, and end the others.

The thread of every rank (`distmp.distributed.rank_monitor`) also publishes a heartbeat each second,
and increments a counter in the store if its main thread has made progress
(`distmp.distributed.progress`). The store returns the sum of all ranks. If the sum does not change
for longer than the limit, no rank has made progress: one rank queries all others and reports the
hang once, and all ranks end.

A rank whose process is stopped, or whose native code holds the GIL, publishes no heartbeats. Its
last heartbeat shows where it stopped. Each rank watches the processes of its machine, and the
heartbeat of the next rank, so that its traffic does not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import psutil
import torch.distributed as dist

from distmp.distributed import flight_recorder
from distmp.distributed.failing_together import describe
from distmp.distributed.limits import LINK_SECONDS, responds, source_address
from distmp.distributed.orphans import is_orphan
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.rank_monitor import RankMonitor
from distmp.distributed.rendezvous_store import Store
from distmp.errors import HANG_EXIT_CODE, LOST_PEER_EXIT_CODE, rank_names
from distmp.faults import hang_report
from distmp.faults.hang_report import Pending, SilentRank
from distmp.masking import print_message

# Number of heartbeats within which a rank answers a question, unless it is blocked.
ANSWER_INTERVALS = 4
# Number of heartbeats within which a rank that has answered also shows its pending collectives.
PENDING_INTERVALS = 10
# Time for the main thread to end by itself after the run has failed on another rank.
GRACE_SECONDS = 3.0
# If the thread did not run for this many intervals, and seconds, the process was stopped.
PAUSE_INTERVALS = 5
# Number of bytes that a process must read or write between two heartbeats to count as progress.
TRANSFER_BYTES = 1 << 16
# An unused real-time signal. It makes a process write the stacks of its threads to standard error,
# also while native code holds the GIL.
STACK_SIGNAL = signal.SIGRTMAX - 5
_ENDING = "ending"

logger = logging.getLogger("distmp")


class Ending(NamedTuple):
    """Why the ranks of a run end.

    Attributes:
        rank: The rank that failed, is gone, or detected a hang.
        cause: The cause in one line.
        exit_code: Exit code of that rank.
    """

    rank: int
    cause: str
    exit_code: int


def ending_of(store: Store) -> Ending | None:
    """Return why a run ended or ends, from the store of its watchdogs; None if it continues."""
    return Ending(*json.loads(store.get(_ENDING))) if store.check([_ENDING]) else None


class Watchdog(RankMonitor):
    """Monitors the ranks of a run in a background thread, and ends them if they hang or are gone.

    Args:
        store: A store that only the ranks of this run share.
        environment: Rank and number of ranks.
        seconds: Time without progress after which a rank hangs.
        first_seconds: The same until the end of the first step, which compiles and starts up.
        store_address: Host and port of the store; None if it is in this process.

    Attributes:
        before_exit: Called before the watchdog ends this process; must return soon.
    """

    def __init__(
        self,
        store: Store,
        environment: RankEnvironment,
        seconds: float,
        first_seconds: float,
        *,
        store_address: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(store, environment.rank, environment.world_size)
        first = environment.rank - environment.local_rank
        self._on_machine = range(first, first + environment.local_world_size)
        self._seconds = seconds
        self._first_seconds = max(seconds, first_seconds)
        self._store_address = store_address
        self._store_unused = threading.Event()
        self._beats = 0
        self._last_turn = self._progress_at = self._next_beat_at = time.monotonic()
        self._counted_at = -math.inf
        self._progress = -1
        self._next_beat: Any = None
        self._next_is_silent = False
        # Whether this rank has ended its first step, and how many ranks have.
        self._has_started = False
        self._started = 0
        self._transferred = 0
        self._has_shown_pending = False
        self._suspects: set[int] = set()
        self.before_exit: Callable[[], object] = lambda: None

    def watch(self) -> None:
        """Start monitoring."""
        self._phase.restart()
        faulthandler.register(STACK_SIGNAL, file=2)
        if self._store_address is not None:
            host, port = self._store_address
            with contextlib.suppress(OSError):
                self.process = self.process._replace(address=source_address(host))
            threading.Thread(target=self._watch_store, args=(host, port), daemon=True).start()
        self._beat()
        self.start()

    def stop(self) -> None:
        """Stop monitoring, and publish that this rank has ended, with or without an error."""
        super().stop()
        faulthandler.unregister(STACK_SIGNAL)
        if not is_orphan():
            with contextlib.suppress(dist.DistError):
                self._put(f"left/{self.rank}", True)
        self._store_unused.set()

    def has_left(self, rank: int) -> bool:
        """Whether a rank has published its end."""
        return self._store.check([f"left/{rank}"])

    # The end of the run

    def end_run(self, ending: Ending) -> bool:
        """Publish why the run ends; return whether this rank was the first to do so."""
        text = json.dumps(ending)
        return bool(self._store.compare_set(_ENDING, "", text) == text.encode())

    def ending(self) -> Ending | None:
        """Return why the run ends, or None while it continues."""
        return ending_of(self._store)

    def end_for_lost_ranks(self) -> bool:
        """End the run if a process of this machine has ended without a message."""
        for rank in sorted(self._gone()):
            process = self._processes[rank]
            cause = (
                f"rank {rank} ended without a message (process {process.identity.pid} on "
                f"{process.host}): it was killed, as the kernel does when memory runs out, crashed "
                "in native code, or called os._exit"
            )
            self._end_for(rank, cause)
            return True
        return False

    def _end_for(self, rank: int, cause: str) -> bool:
        """End the run because a rank is lost; return whether this rank was the first to do so."""
        is_first = self.end_run(Ending(rank, cause, LOST_PEER_EXIT_CODE))
        if is_first:
            print_message(cause)
        return is_first

    def _gone(self) -> set[int]:
        """Return the ranks of this machine whose processes have ended without a message."""
        return {
            rank for rank in self._on_machine if self.has_exited(rank) and not self.has_left(rank)
        }

    # The thread

    def _turn(self) -> None:
        self._detect_pause()
        self._detect_transfer()
        self._beat()
        if ending := self.ending():
            # Give the main thread time to end by itself.
            if not self._stopped.wait(GRACE_SECONDS):
                self._exit(ending)
            return
        super()._turn()
        self._check_for_lost_ranks()
        self._check_next_rank()
        if self._all_are_idle():
            self._report_hang()

    def _lost_store(self, error: RuntimeError) -> None:
        if not self._stopped.is_set() and not is_orphan():
            logger.warning("lost the launcher's store; ranks are not monitored any more: %s", error)

    def _beat(self) -> None:
        self._beats += 1
        self._put(f"beat/{self.rank}", [self._beats, str(self._phase.now)])

    def _detect_pause(self) -> None:
        """Restart the limit after the process was stopped: no rank could make progress."""
        now = time.monotonic()
        if now - self._last_turn > PAUSE_INTERVALS * self._interval + PAUSE_INTERVALS:
            self._phase.touch()
            self._progress_at = self._next_beat_at = now
        self._last_turn = now

    def _detect_transfer(self) -> None:
        if self._phase.now.transfers:
            counters = psutil.Process().io_counters()
            before = self._transferred
            self._transferred = counters.read_chars + counters.write_chars
            if self._transferred - before > TRANSFER_BYTES:
                self._phase.touch()

    def _all_are_idle(self) -> bool:
        """Count the progress of this rank; return whether every rank is over its limit.

        Ranks wait for each other: while one of them makes progress, the others wait for that one.
        """
        now = time.monotonic()
        has_progress = self._phase.now.since >= self._counted_at
        self._counted_at = now
        progress = self._store.add("progress", int(has_progress))
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        # A rank counts up to an interval later, and this one sees it up to an interval after that.
        return now - self._progress_at > self._limit() + 2 * self._interval

    def _limit(self) -> float:
        """Return the time without progress after which ranks hang.

        It is longer until every rank has ended its first step, but not while a rank is silent.
        """
        if self._started < self.world_size:
            ends_now = not (self._has_started or self._phase.now.starting)
            self._has_started |= ends_now
            self._started = self._store.add("started", int(ends_now))
        if self._started < self.world_size and not self._store.add("silent", 0):
            return self._first_seconds
        return self._seconds

    def _answer(self) -> None:
        """Answer a question; if ranks hang, also publish pending collectives, which may block."""
        super()._answer()
        if not self._has_shown_pending and self._store.check(["hang"]):
            self._has_shown_pending = True
            pending: Pending = {}
            try:
                pending = flight_recorder.pending()
            except Exception as error:  # noqa: BLE001  # the report on the hang must not fail
                logger.warning("no flight recorder of rank %d: %s", self.rank, describe(error))
            self.publish("pending", pending)

    def _check_for_lost_ranks(self) -> None:
        """End the run if a process of this machine is gone in two checks in a row.

        Its own last message, if any, arrives between the two.
        """
        gone = self._gone()
        if gone & self._suspects:
            self.end_for_lost_ranks()
        self._suspects = gone

    def _check_next_rank(self) -> None:
        """Count the next rank if it is silent; end the run if its machine does not respond."""
        rank, now = (self.rank + 1) % self.world_size, time.monotonic()
        if (beat := self._read(f"beat/{rank}")) != self._next_beat:
            self._next_beat, self._next_beat_at = beat, now
        silence = now - self._next_beat_at
        if (is_silent := silence > self._seconds) != self._next_is_silent:
            self._next_is_silent = is_silent
            self._store.add("silent", 1 if is_silent else -1)
        if silence < LINK_SECONDS or rank in self._on_machine or self.has_left(rank):
            return
        process = self.process_of(rank)
        if process and process.address and not responds(process.address):
            processes = {other: self.process_of(other) for other in range(self.world_size)}
            ranks = [r for r, one in processes.items() if one and one.host == process.host]
            cause = (
                f"machine {process.host} ({process.address}) with {rank_names(ranks)} has been "
                f"silent for {silence:.0f} s and does not respond: it is down, or its connection "
                "is cut"
            )
            if self._end_for(rank, cause):
                record(cause)

    def _watch_store(self, host: str, port: int) -> None:
        """End this rank if the machine of the store is silent, which blocks the other thread."""
        while not self._store_unused.wait(self._interval):
            silence = time.monotonic() - self._last_turn
            if silence > LINK_SECONDS and not responds(host, port):
                cause = (
                    f"the machine of the launcher's store ({host}) has been silent for "
                    f"{silence:.0f} s and does not respond: it is down, or the connection of "
                    f"{self.process.host} to it is cut"
                )
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    print_message(cause)
                    record(cause)
                os._exit(LOST_PEER_EXIT_CODE)

    def _report_hang(self) -> None:
        """Ask every rank what it does, report it once, and end all ranks."""
        own = str(self.rank)
        if self._store.compare_set("hang", "", own) != own.encode():
            return  # another rank reports
        others = self.query(range(self.world_size), ANSWER_INTERVALS * self._interval)
        self._answer()
        others[self.rank] = self.status()
        answers = {rank: status for rank, status in sorted(others.items()) if status is not None}
        silent = {
            rank: self._inspect(rank)
            for rank, status in others.items()
            if status is None and not self.has_left(rank)
        }
        pending = self.collect("pending", list(answers), PENDING_INTERVALS * self._interval)
        idle = min(status.idle for status in answers.values())
        if silent:  # when they made progress is not known
            idle = min(idle, time.monotonic() - self._progress_at)
        report = hang_report.report(idle, answers, silent, self.world_size, pending)
        ending = Ending(self.rank, report.summary, HANG_EXIT_CODE)
        if self.end_run(ending):
            print_message(report.text)
            record(report.summary)
            self._exit(ending)

    def _inspect(self, rank: int) -> SilentRank:
        """Inspect the process of a rank that does not answer."""
        beat = self._read(f"beat/{rank}")
        doing = beat[1] if beat else "startup, before its first heartbeat"
        process = self.process_of(rank)
        if process is None:
            return SilentRank("an unknown machine", 0, doing)
        host, (machine, pid, _), _ = process
        if machine != self.process.identity.machine:
            return SilentRank(host, pid, doing)
        try:
            state: str = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            state = "gone"
        if state == psutil.STATUS_TRACING_STOP:  # by a debugger
            state = "stopped"
        if state not in ("gone", "stopped"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
        return SilentRank(host, pid, doing, state)

    def _exit(self, ending: Ending) -> NoReturn:
        own = ending.rank == self.rank
        if own:
            # Time for the others to see the ending, and for a blocked rank to write its stack.
            time.sleep(self._interval)
        self.before_exit()
        os._exit(ending.exit_code if own else LOST_PEER_EXIT_CODE)


def record(cause: str) -> None:
    """Write a cause to torchrun's error file, so that its report names the right rank."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        hint = "see the message of this rank above, after 'distmp:'"
        extra = {"py_callstack": hint, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w") as out:
            json.dump({"message": {"message": cause, "extraInfo": extra}}, out)
