"""This process and its machine: identity, processor time, priority, cores and memory.

The limits of cores and memory are those of control groups (version 2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
        return cls(_machine(), os.getpid(), started(os.getpid()) or "")

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended.

        False for a process of another machine or container, which cannot be looked up here.
        """
        return self.machine == _machine() and started(self.pid) != self.started


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
    os.nice(NICENESS)  # on Linux, the nice value is that of a thread


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


def started(pid: int) -> str | None:
    """Return when a process started, as text; None if it has ended, also if it is a zombie."""
    try:
        # The name in parentheses may hold anything; the fields follow it, see proc(5).
        state, *fields = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


def holds_within(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it holds within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def output_of(*command: str, seconds: float) -> str | None:
    """Return the output of a program; None if it is missing, fails or takes too long."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
        return done.stdout if done.returncode == 0 else None
    return None


_PR_SET_PDEATHSIG = 1


def signal_when_parent_ends(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends.

    Args:
        number: The signal; 0: none.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def core_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU limit in cores, or None without a limit.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    quotas = []
    for directory in _directories(root):
        words = _read(directory / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def usable_cores() -> int:
    """Return the number of cores on which this process may run, by affinity."""
    return len(os.sched_getaffinity(0))


def granted_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    A quota of half a core counts as one, one of 3.5 cores as three: a thread more than the quota
    would stop all threads for part of each period.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    cores = usable_cores()
    return max(1, min(cores, int(core_quota(root) or cores)))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit in bytes, or None without a limit.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    return min((limit for limit, _ in _memory_groups(root)), default=None)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the free memory of this machine in bytes, at most what the memory limit leaves.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    free: int = psutil.virtual_memory().available
    return min([free, *(max(0, limit - used) for limit, used in _memory_groups(root))])


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the memory limit and the memory in use of each group that has a limit."""
    for directory in _directories(root):
        limit, used = _read(directory / "memory.max"), _read(directory / "memory.current")
        if limit.isdecimal():
            lines = map(str.split, _read(directory / "memory.stat").splitlines())
            # Like the kubelet: the kernel frees this part of the page cache first.
            cache = dict(line for line in lines if len(line) == 2).get("inactive_file", "0")
            yield int(limit), max(0, int(used or 0) - int(cache))


def _directories(root: Path) -> Iterator[Path]:
    """Yield the directories of this process's group and of its parents."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):  # the others are of version 1
            # In a container the path may be that of the host, and only the top is visible.
            group = top / line.removeprefix("0::").lstrip("/")
            while group != top and top in group.parents:
                yield group
                group = group.parent
            yield top


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def return_freed_memory() -> None:
    """Return to the system the freed memory that glibc keeps.

    glibc keeps freed tensors of up to 32 MiB in its heap, and steps reuse them. The start of a run
    and a load free more than a step needs. Takes milliseconds, so call it once and not in every
    step. Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Messages of errors that have no specific class: torch's host allocator, cuBLAS, NCCL and the
# CUDA driver.
_MESSAGES = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "cudaErrorMemoryAllocation",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that GPU or main memory ran out."""
    import torch  # the launcher does not wait for it

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
