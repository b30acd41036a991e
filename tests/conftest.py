"""Fails a test that leaks state, instead of a later test that the leak affects."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from tests.progress import limited

# No example has a limit of time: machines are shared.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Written by tools around the tests, and by tests of other workers, whenever they like.
FOREIGN_FILES = {
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "__pycache__",
    "build",
}
# torch sets the paths of its caches at the first use of its compiler.
FOREIGN_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
# Packages that only extras of distmp install.
EXTRAS = {"accelerate", "kubernetes_validate", "lightning", "peft", "transformers", "trl"}
# Helpers that multiprocessing keeps for the life of the interpreter.
SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# For threads and processes that are still ending when the test returns.
GRACE_SECONDS = 1.0


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a temporary directory, which is the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip the modules that import a package of an extra that is not installed."""
    report = yield
    missing = re.search(r"No module named '(\w+)|needs (\w+); run pip", str(report.longrepr))
    if report.failed and missing and (package := missing[1] or missing[2]) in EXTRAS:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {package}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported, and later none of what this has created."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        importlib.import_module("tests.frozen")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _progress() -> Iterator[None]:
    """Fail a test that hangs; one on a busy machine may take as long as it needs."""
    with limited():
        yield


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Compare the process before and after each test; undo leaks where possible."""
    directory = Path.cwd()
    environment = _environment()
    files = set(os.listdir(directory))
    threads = set(threading.enumerate())
    processes = _child_pids()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    flags = _torch_flags()
    yield
    leaks = [
        *_moved(directory),
        *_changed_variables(environment),
        *_left_files(directory, files),
        *_left_threads(threads),
        *_left_processes(processes),
        *_changed_handlers(handlers),
        *_changed_flags(flags),
        *_left_process_group(),
    ]
    _forget_compiled()
    if leaks:
        pytest.fail("the test leaks: " + "; ".join(leaks), pytrace=False)


def _forget_compiled() -> None:
    """Drop compiled code: after eight versions of a function, torch runs it uncompiled."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _moved(directory: Path) -> Iterator[str]:
    if Path.cwd() != directory:
        yield f"working directory {Path.cwd()}"
        os.chdir(directory)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}


def _changed_variables(before: dict[str, str]) -> Iterator[str]:
    after = _environment()
    if after == before:
        return
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"environment variable {name} = {after.get(name)!r}"
            _restore_variable(name, before.get(name))


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


def _left_files(directory: Path, before: set[str]) -> Iterator[str]:
    for name in sorted(set(os.listdir(directory)) - before - FOREIGN_FILES):
        # A preflight of another test writes one for a moment, beside the directory of its run.
        if not name.startswith(".distmp-preflight-"):
            yield f"file {directory / name}"


def _left_threads(before: set[threading.Thread]) -> Iterator[str]:
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(GRACE_SECONDS)
            if thread.is_alive():
                yield f"thread {thread.name}"


def _child_pids() -> set[int]:
    """Return the child processes of all threads of this process, from Linux's /proc."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            pids.update(map(int, (task / "children").read_text().split()))
    return pids


def _left_processes(before: set[int]) -> Iterator[str]:
    new = _child_pids() - before
    if not new:
        return
    multiprocessing.active_children()  # reaps children that have ended
    processes = [psutil.Process(pid) for pid in new if psutil.pid_exists(pid)]
    foreign = [process for process in processes if not _is_server(process)]
    _, alive = psutil.wait_procs(foreign, timeout=GRACE_SECONDS)
    for process in alive:
        yield f"process {process.pid} ({' '.join(process.cmdline())})"
        process.kill()
        process.wait()


def _is_server(process: psutil.Process) -> bool:
    return any(server in " ".join(process.cmdline()) for server in SERVERS)


def _changed_handlers(before: dict[signal.Signals, Any]) -> Iterator[str]:
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            yield f"handler of {number.name}"
            signal.signal(number, handler)


def _torch_flags() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Return torch's global settings by name: the value and the function that sets it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "use_deterministic_algorithms"):
        return {}
    return {
        "default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "number of threads": (torch.get_num_threads(), torch.set_num_threads),
        "deterministic algorithms": (
            torch.get_deterministic_debug_mode(),
            torch.set_deterministic_debug_mode,
        ),
        "matmul precision": (
            torch.get_float32_matmul_precision(),
            torch.set_float32_matmul_precision,
        ),
        "gradient mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
    }


def _changed_flags(before: dict[str, tuple[Any, Callable[[Any], Any]]]) -> Iterator[str]:
    after = _torch_flags()
    for name, (value, restore) in before.items():
        if after[name][0] != value:
            yield f"torch's {name} = {after[name][0]}"
            restore(value)


def _left_process_group() -> Iterator[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        yield "default process group"
        distributed.destroy_process_group()
