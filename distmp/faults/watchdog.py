"""Finds ranks that hang or are gone, says which and where, and ends the others.

Every rank has a thread that gives a sign of life each second: how long ago the main thread last got
further (see `activity`), and where it is. The first and the last rank look at all of them; when
nobody has got further for so long that something must be wrong, one of the two asks every rank
where it stands, reports it once, and all ranks end.

A rank whose process is stopped, or whose native code keeps Python's lock, gives no signs. It is as
good as known where it is: the signs stop where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

import psutil
import torch.distributed as dist

from distmp.distributed.progress import Activity
from distmp.errors import HANG_EXIT_CODE, LOST_PEER_EXIT_CODE
from distmp.faults import hang_report, stacks
from distmp.faults.peers import Answer, Ending, Peers, RankPlace, Status
from distmp.utils.frames import collective

INTERVAL_SECONDS = 1.0
# How many signs later a rank that has been asked has answered, unless it cannot.
ANSWER_INTERVALS = 4
# How long the main thread may take to end by itself after the run has failed elsewhere.
GRACE_SECONDS = 3.0
# The thread itself was not run for so many intervals: the process had been stopped.
PAUSE_INTERVALS = 5
# What the process has to read or write between two signs to have got further with a transfer.
TRANSFER_BYTES = 1 << 16

logger = logging.getLogger("distmp")


class Watchdog:
    """Watches this rank, and the others with it, in a thread of its own.

    Args:
        peers: The ranks.
        activity: What the main thread of this one does.
        seconds: Without progress for so long, a rank hangs.
        first_seconds: The same until the first step has ended, which compiles and starts up.
        interval_seconds: From one sign of life to the next.
    """

    def __init__(
        self,
        peers: Peers,
        activity: Activity,
        seconds: float,
        first_seconds: float,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self.peers = peers
        self._activity = activity
        self._seconds = seconds
        self._first_seconds = max(seconds, first_seconds)
        self._interval = interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._count = 0
        self._last_turn = time.monotonic()
        self._transferred = 0
        self._answered = False
        self._places: dict[int, RankPlace] = {}
        self._suspects: set[int] = set()
        self._observes = peers.rank in (0, peers.world_size - 1)
        self._observer = Observer()

    def start(self) -> None:
        """Begin to watch."""
        self._activity.restart()
        self._stack = stacks.SharedStack()
        self._beat()
        place = RankPlace(socket.gethostname(), os.getpid(), self._stack.descriptor)
        self.peers.introduce(place)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and say to the others that this rank has come to its end."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._stack.close()
        with contextlib.suppress(dist.DistError):
            self.peers.leave()

    def bury(self) -> bool:
        """End the run because a process of this machine has ended without a word, if one has."""
        gone = self._gone()
        if not gone:
            return False
        rank = gone[0]
        cause = died(rank, self._places[rank])
        if self.peers.end(Ending(rank, self._activity.now.step, cause, LOST_PEER_EXIT_CODE)):
            say(cause)
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
            while not self._stopped.wait(self._interval):
                self._turn()
        except dist.DistError as error:
            if not self._stopped.is_set():
                logger.warning(
                    "the store of the launcher is gone, ranks are not watched: %s", error
                )

    def _turn(self) -> None:
        self._notice_pauses()
        self._notice_transfers()
        self._beat()
        if ending := self.peers.ending():
            self._end_with(ending)
            return
        if not self._answered and self.peers.is_asked():
            self.peers.answer(self._answer())
            self._answered = True
        self._look_for_the_dead()
        if self._observes and self._observer.see(self.peers.statuses(), time.monotonic()):
            self._report_hang()

    def _beat(self) -> None:
        self._count += 1
        doing = self._activity.now
        limit = self._first_seconds if doing.starting else self._seconds
        idle = time.monotonic() - doing.since
        self.peers.beat(Status(self._count, idle, limit, str(doing)))

    def _notice_pauses(self) -> None:
        """Begin to count anew after the process was stopped: nobody could have got further."""
        now = time.monotonic()
        if now - self._last_turn > PAUSE_INTERVALS * self._interval + PAUSE_INTERVALS:
            self._activity.touch()
            self._observer = Observer()
        self._last_turn = now

    def _notice_transfers(self) -> None:
        if self._activity.now.transfers:
            counters = psutil.Process().io_counters()
            transferred = counters.read_chars + counters.write_chars
            if transferred - self._transferred > TRANSFER_BYTES:
                self._transferred = transferred
                self._activity.touch()

    def _answer(self) -> Answer:
        frame = stacks.main_thread()
        doing = self._activity.now
        return Answer(
            doing=str(doing),
            idle=time.monotonic() - doing.since,
            waits_in=collective(frame),
            collectives=_collectives_started(),
            last=self._activity.collective,
            stack=stacks.show(frame),
        )

    def _look_for_the_dead(self) -> None:
        """End the run if a process of this machine is gone, and was so the last time already.

        In between its own last message has arrived, if there is one.
        """
        gone = set(self._gone())
        if gone & self._suspects:
            self.bury()
        self._suspects = gone

    def _report_hang(self) -> None:
        """Ask every rank where it stands, say it once, and end all of them."""
        peers = self.peers
        statuses = peers.statuses()
        peers.ask()
        peers.answer(self._answer())
        self._answered = True
        for _ in range(ANSWER_INTERVALS):
            time.sleep(self._interval)
            answers = peers.answers(statuses)
            if len(answers) == len(statuses):
                break
        silent = sorted(statuses.keys() - answers.keys())
        report = hang_report.report(
            statuses, answers, {rank: self._find_out(rank) for rank in silent}, peers.world_size
        )
        step = self._activity.now.step
        ending = Ending(peers.rank, step, report.summary, HANG_EXIT_CODE, silent)
        if peers.end(ending):
            say(report.text)
            record(report.summary)
            self._exit(ending)

    def _find_out(self, rank: int) -> hang_report.Silence:
        """Find out from outside what has become of a rank that does not answer."""
        place = self._places.get(rank)
        if place is None or place.host != socket.gethostname():
            return hang_report.Silence(place.host if place else "?", place.pid if place else 0)
        try:
            state: str = psutil.Process(place.pid).status()
        except psutil.NoSuchProcess:
            state = "gone"
        stack = "" if state in ("gone", "stopped") else stacks.of_process(place.pid, place.stack)
        return hang_report.Silence(place.host, place.pid, state, stack)

    def _end_with(self, ending: Ending) -> None:
        """Give the main thread time to end by itself, then end the process."""
        if not self._stopped.wait(GRACE_SECONDS):
            self._exit(ending)

    def _exit(self, ending: Ending) -> NoReturn:
        if ending.rank == self.peers.rank:
            # The launcher should see this rank end before those that it is about to kill.
            time.sleep(self._interval)
        for rank in ending.silent:
            place = self._places.get(rank)
            if place and place.host == socket.gethostname() and rank != self.peers.rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
        own = ending.rank == self.peers.rank
        os._exit(ending.exit_code if own else LOST_PEER_EXIT_CODE)


def died(rank: int, place: RankPlace) -> str:
    """Say that a process is gone that left no message."""
    return (
        f"rank {rank} is gone without a message (process {place.pid} on {place.host}): it was "
        "killed, as the kernel does when memory runs out, or crashed in native code"
    )


def record(cause: str) -> None:
    """Leave a cause where torchrun looks for one; its own report then names the right rank."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        shown = "the message of this rank stands above, behind 'distmp:'"
        extra = {"py_callstack": shown, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w") as out:
            json.dump({"message": {"message": cause, "extraInfo": extra}}, out)


def say(text: str) -> None:
    """Print a message to standard error in one piece."""
    sys.stderr.write(f"distmp: {text}\n")
    sys.stderr.flush()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _collectives_started() -> int:
    """Return how many collectives of all ranks this one has started, or -1 if torch does not say.

    The number is torch's own, of a method that it does not promise to keep.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    number = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return -1 if number is None else int(number())
    except RuntimeError:
        return -1


class Observer:
    """Decides from signs of life whether nobody gets further."""

    def __init__(self) -> None:
        # Count of the last sign of life of a rank, and when it was seen first.
        self._seen: dict[int, tuple[int, float]] = {}

    def see(self, statuses: Mapping[int, Status], now: float) -> bool:
        """Return whether every rank is over its limit.

        Ranks wait for each other. While one of them gets further, the others wait for that one.

        Args:
            statuses: The last sign of life of each rank that has not left.
            now: On the clock of this rank; those of others are not compared.
        """
        for rank, status in statuses.items():
            if self._seen.get(rank, (None,))[0] != status.count:
                self._seen[rank] = (status.count, now)
        return bool(statuses) and all(
            status.idle + now - self._seen[rank][1] > status.limit
            for rank, status in statuses.items()
        )
