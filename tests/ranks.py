"""Tests whose body runs on several ranks: real processes that communicate with gloo.

    @ranks(2)
    def test_sum() -> None:
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        assert total == 3

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    @ranks()
    def test_any(world_size: int, tmp_path: Path) -> None: ...

    @ranks(2)
    @in_turn("strategy", ["ddp", "fsdp"])
    def test_each(strategy: str) -> None: ...

Fixtures and parameters are pickled and passed to every rank. The decorator calls `run_ranks`, which
tests can call themselves to compare the results of ranks.

Processes are forked from a server that has imported torch and distmp once, so starting one costs a
fraction of a second. The server never runs a tensor operation: a thread started there would be lost
in its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from _pytest.assertion import install_importhook
from _pytest.config import default_plugins, get_config

from tests.progress import INTERVAL_SECONDS, PROCESSOR_SECONDS, Progress

Test = TypeVar("Test", bound=Callable[..., None])

PRELOAD = (
    "pytest",
    "torch",
    "torch._dynamo",  # DTensor imports it when it is first used
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "hypothesis",
    "tyro",
    "distmp.parallel.fsdp",
    "distmp.training.train_as_rank",
    "tests.recording",
    "tests.reference",
    *(f"_pytest.{name}" for name in default_plugins),
    "tests.frozen",
)

# How long the other ranks may run after one has failed, to separate the cause from its effects.
GRACE_SECONDS = 0.3
# How long a rank may take to end after its body has returned on every rank.
EXIT_SECONDS = 10.0
# Makes a rank write its stack. Runs of distmp handle signals that nothing else does, not this one.
_WRITE_STACK = signal.SIGXCPU

# Bodies of decorated tests by (module, qualified name), filled on import in the ranks too.
_bodies: dict[tuple[str, str], Callable[..., Any]] = {}


def ranks(
    world_size: int | None = None,
    *,
    timeout: float = 60.0,
    initialize: bool = True,
    cuda: bool = False,
) -> Callable[[Test], Test]:
    """Run the decorated test on `world_size` ranks.

    Args:
        world_size: Number of processes; None takes the test's own argument `world_size`.
        timeout: Seconds without progress, see `tests.progress`, after which the ranks are ended and
            the test fails.
        initialize: Whether the default process group exists when the body starts: gloo.
        cuda: Whether each rank gets a GPU and NCCL. With fewer GPUs than ranks, they share one over
            gloo.
    """

    def decorate(body: Test) -> Test:
        if world_size is None and "world_size" not in inspect.signature(body).parameters:
            raise TypeError(f"{body.__qualname__} needs an argument `world_size`, or ranks(N)")
        key = (body.__module__, body.__qualname__)
        _bodies[key] = body

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            size = world_size if world_size is not None else kwargs["world_size"]
            call = (key, args, kwargs)
            options: Any = {"timeout": timeout, "initialize": initialize, "cuda": cuda}
            run_ranks(_call_body, size, *call, **options)

        return test  # type: ignore[return-value]

    return decorate


def in_turn(names: str | tuple[str, ...], values: Sequence[Any]) -> Callable[[Test], Test]:
    """Run the body for each value of its argument on the same ranks; decorates below `ranks`.

    It replaces `pytest.mark.parametrize` where bodies take less time than the start of ranks.

    Args:
        names: An argument of the body, or several.
        values: Its values; tuples for several arguments.
    """

    def decorate(body: Test) -> Test:
        own = [names] if isinstance(names, str) else names

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            for value in values:
                case = dict(zip(own, [value] if isinstance(names, str) else value, strict=True))
                sys.stdout.write(f"{case}\n")  # shown if it fails
                body(*args, **case, **kwargs)
                gc.collect()  # as at the end of a process

        signature = inspect.signature(body)
        left = [each for name, each in signature.parameters.items() if name not in own]
        test.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return test  # type: ignore[return-value]

    return decorate


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    initialize: bool = True,
    cuda: bool = False,
) -> list[Any]:
    """Call `function(*args)` on every rank.

    Args:
        function: Importable by its module and name; it and `args` are pickled.
        world_size: Number of processes.
        *args: Given to every rank.
        timeout: Seconds without progress, see `tests.progress`, after which all ranks are ended and
            the test fails.
        initialize: Whether the default process group exists when the function starts.
        cuda: As in `ranks`.

    Returns:
        The results of the ranks, in rank order.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        job = _Job(
            world_size=world_size,
            call=pickle.dumps((function, args)),
            environment=dict(os.environ),
            directory=Path(directory),
            timeout=timeout,
            initialize=initialize,
            cuda=cuda,
        )
        with _started(job) as team:
            reports = _collect(job, team)
            if all(report.outcome == "returned" for report in reports):
                return [report.result for report in _dismiss(job, team, reports)]
    return _fail(job, reports)


def from_all_ranks(value: Any) -> list[Any]:
    """Return the values that the ranks pass, in the order of ranks. Collective."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_on_all_ranks(value: Any) -> bool:
    """Return whether the ranks pass the same value, where NaN equals NaN. Collective."""
    return len(set(map(repr, from_all_ranks(value)))) == 1


@dataclass(frozen=True)
class _Job:
    """The description of one run, sent to every rank."""

    world_size: int
    call: bytes  # pickled (function, args)
    environment: dict[str, str]
    directory: Path  # rendezvous, outputs and stacks
    timeout: float
    initialize: bool
    cuda: bool

    def name(self, rank: int) -> str:
        return f"rank {rank} of {self.world_size}"

    def output(self, rank: int) -> Path:
        return self.directory / f"output-{rank}"

    def stack(self, rank: int) -> Path:
        return self.directory / f"stack-{rank}"


@dataclass(frozen=True)
class _Report:
    """How a rank ended."""

    rank: int
    outcome: Literal["returned", "raised", "skipped", "died", "unfinished"]
    # Monotonic clock, the same for all processes. A rank that died comes first: the other ranks
    # report only the lost connection.
    time: float = 0.0
    text: str = ""
    result: Any = None


@dataclass(frozen=True)
class _Member:
    """A rank, in the process of the test."""

    rank: int
    process: ForkServerProcess
    connection: Connection


# In the test's process


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


@contextlib.contextmanager
def _started(job: _Job) -> Iterator[list[_Member]]:
    """Start the ranks; in any case, end all of them and show their output."""
    team: list[_Member] = []
    try:
        for rank in range(job.world_size):
            ours, theirs = _context().Pipe()
            process = _context().Process(
                target=_rank_main, args=(job, rank, theirs), name=job.name(rank), daemon=True
            )
            team.append(_Member(rank, process, ours))
            process.start()
            theirs.close()
        yield team
    finally:
        for member in team:
            _end(member)
            _show_output(job, member.rank)


def _end(member: _Member) -> None:
    member.connection.close()
    if member.process.pid is not None:
        member.process.kill()
        member.process.join()
    member.process.close()


def _show_output(job: _Job, rank: int) -> None:
    path = job.output(rank)
    text = path.read_text(errors="replace") if path.exists() else ""
    if text:
        sys.stdout.write(f"--- output of {job.name(rank)} ---\n{text.rstrip()}\n")


def _collect(job: _Job, team: list[_Member]) -> list[_Report]:
    """Wait until every rank has reported, one has failed, or there is no progress."""
    reports: dict[int, _Report] = {}
    deadline = math.inf
    pids = [member.process.pid or 0 for member in team]
    progress = Progress(pids, job.timeout, PROCESSOR_SECONDS)
    while len(reports) < len(team):
        waiting = {m.connection: m for m in team if m.rank not in reports}
        limit = min(INTERVAL_SECONDS, max(0.0, deadline - time.monotonic()))
        ready = wait(list(waiting), timeout=limit)
        if not ready and (time.monotonic() >= deadline or progress.problem()):
            break
        for connection in ready:
            member = waiting[connection]  # type: ignore[index]
            reports[member.rank] = report = _receive(member)
            if report.outcome != "returned":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    unfinished = [m for m in team if m.rank not in reports]
    return [*reports.values(), *_ask_where(job, unfinished)]


def _receive(member: _Member) -> _Report:
    try:
        return pickle.loads(member.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        member.process.join()
        return _Report(member.rank, "died", text=_how_it_died(member.process.exitcode))


def _how_it_died(code: int | None) -> str:
    if code is not None and code < 0:
        return f"died of signal {signal.Signals(-code).name}"
    return f"died with exit code {code}"


def _ask_where(job: _Job, unfinished: list[_Member]) -> list[_Report]:
    """Make the ranks that still run write their stacks."""
    for member in unfinished:
        if member.process.pid is not None and member.process.is_alive():
            os.kill(member.process.pid, _WRITE_STACK)
    if unfinished:
        time.sleep(0.1)
    reports = []
    for member in unfinished:
        path = job.stack(member.rank)
        stack = path.read_text() if path.exists() else ""
        reports.append(_Report(member.rank, "unfinished", text=stack or "(no stack: starting)\n"))
    return reports


def _dismiss(job: _Job, team: list[_Member], reports: list[_Report]) -> list[_Report]:
    """Let the ranks end; a crash or a hang during shutdown is a failure too."""
    __tracebackhide__ = True
    for member in team:
        member.connection.close()
    for member in team:
        code = _exit_code(member)
        if code is None:
            pytest.fail(f"{job.name(member.rank)} returned but did not end", pytrace=False)
        if code != 0:
            how = _how_it_died(code)
            pytest.fail(f"{job.name(member.rank)} returned, then {how}", pytrace=False)
    return sorted(reports, key=lambda report: report.rank)


def _exit_code(member: _Member) -> int | None:
    """Wait for the end of a rank as long as it makes progress; return None without an end."""
    progress = Progress([member.process.pid or 0], EXIT_SECONDS, PROCESSOR_SECONDS)
    while member.process.exitcode is None and not progress.problem():
        member.process.join(INTERVAL_SECONDS)
    return member.process.exitcode


def _fail(job: _Job, reports: list[_Report]) -> Any:
    """Fail the test with the first failure of a rank."""
    __tracebackhide__ = True
    failed = [r for r in reports if r.outcome in ("raised", "skipped", "died")]
    if not failed:
        stuck = [r for r in reports if r.outcome == "unfinished"]
        names = ", ".join(job.name(r.rank) for r in stuck)
        stacks = "".join(f"\n{job.name(r.rank)}:\n{r.text}" for r in stuck)
        pytest.fail(f"no progress for {job.timeout:g} s: {names}\n{stacks}", pytrace=False)
    first = min(failed, key=lambda report: report.time)
    if first.outcome == "skipped":
        pytest.skip(first.text)
    separator = " " if first.outcome == "died" else " raised\n"
    pytest.fail(f"{job.name(first.rank)}{separator}{first.text}", pytrace=False)


# In a rank's process


def _rank_main(job: _Job, rank: int, connection: Connection) -> None:
    """Run the job's function, report, and wait until the other ranks are done."""
    _prepare_process(job, rank)
    report = _run(job, rank)
    sys.stdout.flush()
    connection.send_bytes(report)
    # Ending now would break the connections that the other ranks still use.
    with contextlib.suppress(EOFError):
        connection.recv_bytes()
    _destroy_process_group()


def _prepare_process(job: _Job, rank: int) -> None:
    # Linux's PR_SET_PDEATHSIG: no rank outlives a test run that was killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    output = os.open(job.output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    stack = job.stack(rank).open("w")
    faulthandler.register(_WRITE_STACK, file=stack)
    # Rewrites assert, so that a failing one shows its values. pytest has no public function for
    # this outside of its own process.
    install_importhook(get_config())
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        GLOO_SOCKET_IFNAME="lo",
    )


def _run(job: _Job, rank: int) -> bytes:
    """Return the pickled report."""
    try:
        _prepare_torch(job, rank)
        with _replayed():
            function, args = pickle.loads(job.call)
            result = function(*args)
        return pickle.dumps(_Report(rank, "returned", result=result))
    except pytest.skip.Exception as skip:
        return pickle.dumps(_Report(rank, "skipped", time.monotonic(), str(skip)))
    except BaseException:  # noqa: BLE001  (the process of the test reports any of them)
        return pickle.dumps(_Report(rank, "raised", time.monotonic(), traceback.format_exc()))


def _prepare_torch(job: _Job, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    own_gpu = job.cuda and torch.cuda.device_count() >= job.world_size
    if job.cuda:
        torch.cuda.set_device(rank if own_gpu else 0)
    if job.initialize:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
            store=dist.FileStore(  # type: ignore[attr-defined]
                str(job.directory / "rendezvous"), job.world_size
            ),
            rank=rank,
            world_size=job.world_size,
            # The job's own limit comes first, and shows where every rank is.
            timeout=timedelta(seconds=10 * job.timeout + 600),
        )


def _replayed() -> contextlib.AbstractContextManager[None]:
    """Replay the rank's operations in other orders, if it runs on fake devices."""
    if "FAKE_CUDA_DEVICES" not in os.environ:
        return contextlib.nullcontext()
    from tests.fake_cuda.replaying import replayed

    return replayed()


def _destroy_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _call_body(key: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    importlib.import_module(key[0])
    _bodies[key](*args, **kwargs)
