"""Runs a test on several ranks: processes with a default process group over gloo.

In `conftest.py`: `pytest_plugins = ["distmp.testing.pytest_plugin"]`. Then

    @pytest.mark.ranks(2)
    def test_gradient(): ...

runs the test's function on two ranks. Parameters and fixtures are pickled. The ranks are forked
from a server that has imported torch once. They meet in a file, so no port is used, and end with
the test. The first rank that fails decides the message.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest

# Seconds after which a rank ends, and writes where it is, unless the marker says otherwise.
_TIMEOUT = 60.0


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and what the server of ranks imports before they are forked."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "pytest"])
    config.addinivalue_line("markers", "ranks(n, timeout=60): run the test on n ranks over gloo")


def _options(n: int, timeout: float = _TIMEOUT) -> tuple[int, float]:
    """Return what a marker says."""
    if type(n) is not int or n < 1 or not timeout > 0:
        raise TypeError("use 1 or more ranks, and seconds above 0")
    return n, timeout


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks, instead of in this process."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    n, timeout = _options(*marker.args, **marker.kwargs)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    call = pickle.dumps((pyfuncitem.obj, arguments))
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        _run(call, n, timeout, directory)
    return True


def _run(call: bytes, n: int, timeout: float, directory: str) -> None:
    """Run a function on all ranks; fail with the output of the first one that failed."""
    from torch.multiprocessing.spawn import ProcessException, start_processes

    try:
        start_processes(_rank_main, (call, n, timeout, directory), n, True, True, "forkserver")
        return
    except ProcessException as error:
        rank, problem = error.error_index, str(error).strip()
    output = Path(directory, f"output-{rank}")
    text = output.read_text(errors="replace") if output.exists() else ""
    pytest.fail(f"rank {rank} of {n}: {problem}\n\n{text}", pytrace=False)


def _rank_main(rank: int, call: bytes, world_size: int, timeout: float, directory: str) -> None:
    """Call the test's function on one rank, and wait for the other ranks."""
    import torch
    import torch.distributed as dist

    output = os.open(f"{directory}/output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/rendezvous", world_size)  # type: ignore[attr-defined]
    limit = timedelta(days=1)  # the test's own limit comes first
    dist.init_process_group("gloo", None, limit, world_size, rank, store)
    faulthandler.dump_traceback_later(timeout, exit=True)
    function, arguments = pickle.loads(call)
    function(**arguments)
    faulthandler.cancel_dump_traceback_later()
    # Ending now would break the connections that the other ranks still use.
    store.add("done", 1)
    while store.add("done", 0) < world_size:
        time.sleep(0.01)
