"""Runs the processes of a job, and ends all of them.

[Note: descendants of a job] torchrun starts each rank in a new session, so signals to the process
group of a job do not reach ranks. A rank whose parent has ended gets a new parent, so a
walk from the job does not find it either. `adopt_orphans` makes this process that new parent: all
processes that a job has started stay descendants of this one, which starts one job at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
# How long processes may take to print their stacks, and to end.
_STACK_SECONDS = 3.0
END_SECONDS = 10.0


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended (Linux)."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed; ranks of a job could outlive it")


class UnendedError(RuntimeError):
    """A process of a job does not end, not even when it is killed.

    Attributes:
        code: The exit code of the job; None if it exceeded its time limit.
    """

    def __init__(self, pids: Sequence[int], code: int | None) -> None:
        super().__init__(f"processes {', '.join(map(str, pids))} did not end when killed")
        self.code = code


def run(
    command: Sequence[str], limit: float, log: Path, environment: Mapping[str, str], cwd: Path
) -> int | None:
    """Run a command, then end all descendants of this process.

    Args:
        command: The command.
        limit: Time limit in seconds. At the limit, Python processes first print their stacks.
        log: File for its output.
        environment: Its environment variables.
        cwd: Its working directory.

    Returns:
        The exit code, or None if it exceeded the limit.

    Raises:
        UnendedError: If a process has not ended `END_SECONDS` after it was killed.
    """
    # Processes that are aborted write their stacks, but no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    environment = {**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
        )
        code = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            _print_stacks()
        finally:
            left = end_descendants()
            process.poll()
    if left:
        raise UnendedError(left, code)
    return code


def end_descendants() -> list[int]:
    """Kill all descendants of this process; return those that have not ended in `END_SECONDS`."""
    end = time.monotonic() + END_SECONDS
    # Processes can start others until they are killed.
    while (processes := _descendants()) and time.monotonic() < end:
        for process in processes:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=0.2)
    return [process.pid for process in _descendants()]


def _print_stacks() -> None:
    """Abort all descendants one after the other: they write to the same log."""
    end = time.monotonic() + _STACK_SECONDS
    for process in _descendants():
        _signal(process, signal.SIGABRT)
        psutil.wait_procs([process], timeout=max(end - time.monotonic(), 0))


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
