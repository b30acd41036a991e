"""Identity, processor time and priority of processes and threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

_PROC = Path("/proc")

# Added to the nice value of a background thread; the system limits the sum.
NICENESS = 10


class ProcessIdentity(NamedTuple):
    """Identifies a process until its machine restarts.

    Attributes:
        machine: The boot of the machine and the PID namespace, in which `pid` is unique.
        pid: Process ID.
        started: Start time. Process IDs are reused; the pair is not.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Return the identity of the calling process."""
        return cls(_machine(), os.getpid(), _started(os.getpid()) or "")

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended.

        False for a process of another machine or container, which cannot be looked up here.
        """
        return self.machine == _machine() and _started(self.pid) != self.started


def thread_seconds(thread_id: int) -> float:
    """Return the processor time of a thread of this process.

    Args:
        thread_id: `threading.Thread.ident`; a thread that has ended counts as 0.
    """
    if thread_id not in sys._current_frames():
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread_id))


def lower_priority() -> None:
    """Lower the scheduling priority of this thread."""
    thread = threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, nice + NICENESS)


def child_seconds() -> float:
    """Return the processor time of all child processes, including those that have ended."""
    ended = os.times()
    total = ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _machine() -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{(_PROC / 'self/ns/pid').stat().st_ino}"


def _started(pid: int) -> str | None:
    """Return when a process started, as text; None if it has ended."""
    try:
        # The name in parentheses may hold anything; the fields follow it, see proc(5).
        state, *fields = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


_PR_SET_PDEATHSIG = 1


def signal_when_parent_ends(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends.

    Args:
        number: The signal; 0: none.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
