"""Runs a test on several ranks: processes with a default process group over gloo.

In `conftest.py`: `pytest_plugins = ["distmp.testing.pytest_plugin"]`. Then

    @pytest.mark.ranks(2)
    def test_gradient(): ...

runs the test's function on two ranks. Parameters and fixtures are pickled. The ranks meet in a
file, so no port is used, and end with the test. The first rank that fails decides the message.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_TIMEOUT = 60.0
# How long other ranks may run after one has failed, to separate the cause from its effects.
_GRACE = 0.3


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "ranks(n, timeout=60): run the test on n ranks over gloo")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks, instead of in this process."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    function = pyfuncitem.module.__name__, pyfuncitem.function.__qualname__, arguments
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        job = _Job(function, marker.args[0], marker.kwargs.get("timeout", _TIMEOUT), directory)
        problem = _run(job)
    if problem:
        pytest.fail(problem, pytrace=False)
    return True


class _Job(NamedTuple):
    """The description of one run; the function is a module, a name in it, and arguments."""

    function: tuple[str, str, dict[str, Any]]
    world_size: int
    timeout: float
    directory: str


def _run(job: _Job) -> str | None:
    """Run a function on all ranks; return what is wrong on the first one that failed."""
    failures: list[tuple[float, int, str]] = []
    with _started(job) as team:
        left: dict[Any, int] = {connection: rank for rank, (connection, _) in enumerate(team)}
        deadline = time.monotonic() + job.timeout
        while left and time.monotonic() < deadline:
            for connection in wait([*left], timeout=max(0.0, deadline - time.monotonic())):
                failures += _failure(left.pop(connection), connection)
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE)
        if left and not failures:
            for rank in left.values():
                os.kill(team[rank][1].pid, signal.SIGUSR1)
                failures.append((time.monotonic(), rank, f"no end in {job.timeout:g} s"))
            time.sleep(_GRACE)
    if not failures:
        return None
    _, rank, text = min(failures)
    output = Path(job.directory, f"output-{rank}").read_text(errors="replace")
    return f"rank {rank} of {job.world_size}: {text}\n{output}"


def _failure(rank: int, connection: Any) -> list[tuple[float, int, str]]:
    try:
        when, text = connection.recv()
    except EOFError:  # earlier than what it causes on other ranks
        return [(0.0, rank, "died without an exception")]
    return [(when, rank, text)] if text else []


@contextlib.contextmanager
def _started(job: _Job) -> Iterator[list[tuple[Any, Any]]]:
    """Start the ranks, and end all of them in any case; yield their connections and processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    team: list[tuple[Any, Any]] = []
    try:
        for rank in range(job.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(job, rank, theirs), daemon=True)
            team.append((ours, process))
            process.start()
            theirs.close()
        yield team
    finally:
        for connection, process in team:
            connection.close()
            process.kill()
            process.join()


def _rank_main(job: _Job, rank: int, connection: Connection) -> None:
    """Call the test's function on one rank, report, and wait to be ended."""
    output = os.open(f"{job.directory}/output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1)  # shows where a rank hangs
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    text = ""
    try:
        _call(job, rank)
    except BaseException:  # noqa: BLE001  (the process of the test reports any of them)
        text = traceback.format_exc()
    connection.send((time.monotonic(), text))
    # Ending now would break the connections that the other ranks still use.
    with contextlib.suppress(EOFError):
        connection.recv()


def _call(job: _Job, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{job.directory}/rendezvous", job.world_size)  # type: ignore[attr-defined]
    limit = timedelta(days=1)  # the test's own limit comes first
    dist.init_process_group("gloo", None, limit, job.world_size, rank, store)
    module, name, arguments = job.function
    *classes, method = name.split(".")
    owner: Any = reduce(getattr, classes, importlib.import_module(module))
    getattr(owner() if classes else owner, method)(**arguments)
