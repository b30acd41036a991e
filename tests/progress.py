"""Limits on lack of progress, not on wall time: a busy machine makes tests slow, and no test wrong.

Processes make progress while they use processor time. A test that hangs uses none, however much the
machine has to do; a test that runs wild uses more than any test needs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep  # not those of `time`, which tests replace
from types import FrameType
from typing import Any

import psutil
import pytest

# A process tree that uses a smaller share of one core is idle: threads that poll use less, and one
# of a dozen busy processes on two cores gets more.
IDLE_SHARE = 0.02
# How often processes are looked at.
INTERVAL_SECONDS = 0.5
# Limits of a test: how long it may be idle, and the processor time of its whole process tree.
IDLE_SECONDS = 120.0
PROCESSOR_SECONDS = 900.0


class Progress:
    """Measures the progress of processes and their descendants.

    Args:
        pids: The processes; with `descendants_only` only what they have started counts.
        idle_seconds: How long all of them together may be idle.
        processor_seconds: How much processor time they may use.
    """

    def __init__(
        self,
        pids: list[int],
        idle_seconds: float = IDLE_SECONDS,
        processor_seconds: float = PROCESSOR_SECONDS,
        *,
        descendants_only: bool = False,
    ) -> None:
        self._pids = pids
        self._descendants_only = descendants_only
        self._idle_seconds = idle_seconds
        self._processor_seconds = processor_seconds
        # By process and its start, since numbers of processes are used again.
        self._used: dict[tuple[int, float], float] = {}
        self._looked = monotonic()
        self._idle_since = self._looked
        self._total = 0.0
        self._measure()

    def problem(self) -> str | None:
        """Return what is wrong, or None while there is progress."""
        now = monotonic()
        used = self._measure()
        if used > IDLE_SHARE * (now - self._looked):
            self._idle_since = now
        self._total += used
        self._looked = now
        if now - self._idle_since > self._idle_seconds:
            return f"no progress for {self._idle_seconds:g} s"
        if self._total > self._processor_seconds:
            return f"more than {self._processor_seconds:g} s of processor time"
        return None

    def _measure(self) -> float:
        """Return the processor time in seconds that was used since the last call."""
        more = 0.0
        roots = () if self._descendants_only else self._pids
        for pid in {*roots, *(pid for root in self._pids for pid in _descendants(root))}:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                started, used = _processor_seconds(pid)
                more += used - self._used.get((pid, started), 0.0)
                self._used[pid, started] = used
        return more


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one, from Linux's own lists: a search would cost milliseconds."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _processor_seconds(pid: int) -> tuple[float, float]:
    """Return when a process started, in clock ticks, and the processor time it has used."""
    # The name in parentheses may hold anything; fields are counted behind it, see proc(5).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(fields[19]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_children() -> Progress:
    """Return the progress of what this process has started, for loops that wait for it."""
    return Progress([os.getpid()], IDLE_SECONDS / 2, descendants_only=True)


def finished(process: subprocess.Popen[str], idle_seconds: float) -> tuple[str, str]:
    """Wait for the end of a process as long as it makes progress, and return its output.

    Raises:
        subprocess.TimeoutExpired: Without progress; the process and its descendants are killed.
    """
    progress = Progress([process.pid], idle_seconds)
    while True:
        try:
            return process.communicate(timeout=INTERVAL_SECONDS)
        except subprocess.TimeoutExpired:
            if progress.problem() is None:
                continue
            kill_all(process)
            raise


def wait_until(condition: Callable[[], bool], state: Callable[[], str] = str) -> None:
    """Wait for a condition as long as the children of this process make progress.

    Args:
        condition: Checked fifty times a second.
        state: Describes what there is instead, for the failure.
    """
    progress = of_children()
    while not condition():
        if problem := progress.problem():
            pytest.fail(f"{problem}: {state()}", pytrace=False)
        sleep(0.02)


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Kill a process and what it has started, unless it has ended."""
    if process.poll() is None:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                each.kill()


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Fail in the main thread if this process and its descendants stop to make progress."""
    done = threading.Event()
    reason = ""

    def watch() -> None:
        nonlocal reason
        if done.wait(INTERVAL_SECONDS):
            return
        progress = Progress([os.getpid()], IDLE_SECONDS)
        while not done.wait(4 * INTERVAL_SECONDS):
            if problem := progress.problem():
                reason = problem
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGVTALRM)
                return

    def fail(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        pytest.fail(f"limit of tests/progress.py: {reason}")

    before = signal.signal(signal.SIGVTALRM, fail)
    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGVTALRM, before)
