"""Runs a test on several ranks: processes with a default process group over gloo.

In `conftest.py`: `pytest_plugins = ["distmp.testing.pytest_plugin"]`. Then

    @pytest.mark.ranks(2)
    def test_gradient(): ...

runs the test's function on two ranks. Async functions and methods of unittest.TestCase are refused.
Parameters and fixtures are pickled. Ranks are forked from a server that has imported torch once.
They meet in a file, so no port is used, and end with the test. The first rank that fails, xfails or
skips decides the outcome; pytest shows the output of all.
"""

from __future__ import annotations

import faulthandler
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import unittest
from datetime import timedelta

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and what the server of ranks imports before they are forked."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "pytest"])
    config.addinivalue_line("markers", "ranks(n, timeout=60): run the test on n ranks over gloo")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marked method of a `unittest.TestCase`, which unittest calls in this process."""
    is_unittest = issubclass(getattr(item, "cls", None) or object, unittest.TestCase)
    if is_unittest and item.get_closest_marker("ranks"):
        pytest.fail("ranks: write a function, or a class without unittest.TestCase", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks, instead of in this process."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _run(pickle.dumps((pyfuncitem.obj, arguments)), *marker.args, **marker.kwargs)
    return True


def _run(call: bytes, n: int, timeout: float = 60.0) -> None:
    """Run a function on all ranks; fail with the message of the first one that failed.

    Args:
        call: The pickled function and its arguments.
        n: Number of ranks.
        timeout: Seconds after which a rank ends, and writes where it is.
    """
    from torch.multiprocessing.spawn import ProcessException, start_processes

    if type(n) is not int or n < 1 or not timeout > 0:
        raise TypeError("use 1 or more ranks, and seconds above 0")
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        arguments = call, n, timeout, f"{directory}/meeting"
        try:
            start_processes(_rank_main, arguments, n, True, True, "forkserver")
        except ProcessException as error:
            problem = f"rank {error.error_index} of {n}: {str(error).strip()}"
            *_, skips, reason = problem.rpartition("\nRuntimeError: Skipped: ")
            if skips:
                raise pytest.skip.Exception(reason, _use_item_location=True) from None
            *_, fails, reason = problem.rpartition("\nRuntimeError: XFailed: ")
            if fails:
                raise pytest.xfail.Exception(reason) from None
            raise pytest.fail.Exception(problem, pytrace=False) from None


def _rank_main(rank: int, call: bytes, world_size: int, timeout: float, meeting: str) -> None:
    """Call the test's function on one rank, and wait for the other ranks."""
    import torch
    import torch.distributed as dist

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, world_size)  # type: ignore[attr-defined]
    limit = timedelta(days=1)  # the test's own limit comes first
    dist.init_process_group("gloo", None, limit, world_size, rank, store)
    faulthandler.dump_traceback_later(timeout, exit=True)
    function, arguments = pickle.loads(call)
    try:
        if inspect.isawaitable(function(**arguments)):
            raise TypeError("ranks do not await async tests; call asyncio.run in the test")
    except BaseException as error:
        # All failures but the first are consequences, and the parent ends their ranks. The first
        # may be one, too, if a process ended without an exception: the parent first notices that.
        time.sleep(timeout if store.add("failures", 1) > 1 else 0.5)
        if isinstance(error, Exception):
            raise
        # torch passes only the text of an `Exception` to the parent.
        as_text = RuntimeError(f"{type(error).__name__}: {error}")
        raise as_text.with_traceback(error.__traceback__) from None
    # Ending now would break the connections that the other ranks still use.
    store.set(f"rank {rank} is done", "")
    store.wait([f"rank {each} is done" for each in range(world_size)], limit)
    faulthandler.cancel_dump_traceback_later()
