"""Runs one case with a process for each rank, and records how each process ended.

Ranks are forked from a process that has imported all modules and computed nothing. So a case takes
a fraction of a second, and a case that hangs or dies does not affect others.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import distmp
from distmp.errors import DistmpError
from tests.progress import INTERVAL_SECONDS, Progress

# How long ranks may be idle until the first has ended, and from then on until the last one has.
FIRST_SECONDS, OTHERS_SECONDS = 30.0, 10.0
# How long a rank that ended without an error waits for the others.
STAY_SECONDS = 0.3
# An error belongs to the innermost file that is not one of these.
LIBRARIES = ("/site-packages/", "/lib/python", "<")
OURS = str(Path(distmp.__file__).parent)


class UserError(Exception):
    """An intended error of the user's code."""


@dataclass
class Ending:
    """How a rank has ended.

    Attributes:
        kind: "well", "message" (an error of distmp), "own" (an error of the user's code), "bare"
            (another error inside of distmp), "died" or "hung".
        text: The error, or the stack of a rank that hangs.
        result: The return value of the script.
        seconds: Seconds since the start.
    """

    kind: str
    text: str = ""
    result: Any = None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} after {self.seconds:.1f} s{': ' if self.text else ''}{self.text}"


def run_trial(body: Callable[[int], Any], world_size: int, *, group: bool) -> list[Ending]:
    """Call `body(rank)` in a new process for each rank.

    Args:
        body: The script.
        world_size: Number of ranks.
        group: Whether there is a default process group.
    """
    with tempfile.TemporaryDirectory(prefix="trial-") as directory:
        team = [
            _Member(body, rank, world_size, group, Path(directory)) for rank in range(world_size)
        ]
        try:
            endings = _wait_for(team)
        finally:
            for member in team:
                member.end()
        return endings


class _Member:
    def __init__(
        self, body: Callable[[int], Any], rank: int, world_size: int, group: bool, place: Path
    ) -> None:
        self.connection, theirs = Pipe()
        self.stack = place / f"stack-{rank}"
        self._output = place / f"output-{rank}"
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            with contextlib.suppress(BaseException):
                self._prepare(rank, world_size)
                ending = _end_of(body, rank, world_size, place if group else None)
                theirs.send_bytes(pickle.dumps(ending))
                if ending.kind == "well":
                    theirs.poll(STAY_SECONDS)
            # The kernel closes files and sockets, as at the end of a script. The other work of the
            # interpreter would take time.
            os._exit(0)
        theirs.close()

    def _prepare(self, rank: int, world_size: int) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: does not outlive its parent
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, file=self.stack.open("w"))
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
        }
        for name, value in variables.items():
            os.environ.pop(name, None)
            if world_size > 1:
                os.environ[name] = str(value)

    def receive(self) -> Ending:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            last = self._output.read_text(errors="replace").splitlines()[-20:]
            return Ending("died", "\n".join(last))

    def stuck(self) -> Ending:
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return Ending("hung", self.stack.read_text())

    def end(self) -> None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _end_of(body: Callable[[int], Any], rank: int, world_size: int, place: Path | None) -> Ending:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if place is not None:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(place / "rendezvous"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=2 * FIRST_SECONDS),
        )
        # Otherwise a rank that ends early breaks one that is still connecting.
        dist.barrier()
    started = time.monotonic()
    try:
        ending = Ending("well", result=body(rank))
    except BaseException as error:  # noqa: BLE001  # how it ends is what the trial is about
        ending = Ending(*_kind_of(error))
    ending.seconds = time.monotonic() - started
    return ending


def _kind_of(error: BaseException) -> tuple[str, str]:
    if isinstance(error, DistmpError):
        return "message", f"{type(error).__name__}: {error}"
    text = "".join(traceback.format_exception(error)[-30:])
    if isinstance(error, UserError):
        return "own", text
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    users = [file for file in files if not any(library in file for library in LIBRARIES)]
    return "bare" if users[-1].startswith(OURS) else "own", text


def _wait_for(team: list[_Member]) -> list[Ending]:
    endings: dict[int, Ending] = {}
    pids = [member.pid for member in team]
    progress = Progress(pids, FIRST_SECONDS)
    while len(endings) < len(team):
        waiting: dict[Connection, int] = {
            member.connection: rank for rank, member in enumerate(team) if rank not in endings
        }
        ready = wait(list(waiting), timeout=INTERVAL_SECONDS)
        if not ready and progress.problem():
            break
        if ready and not endings:
            progress = Progress(pids, OTHERS_SECONDS)
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            endings[rank] = team[rank].receive()
    return [
        endings[rank] if rank in endings else member.stuck() for rank, member in enumerate(team)
    ]
