"""Runs jobs under torchrun's elastic agent, with ranks that start in a fraction of a second.

The agent is forked from the server of tests/ranks.py, which has imported torch, and its ranks are
forked from the agent, so restarts are cheap.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.progress import INTERVAL_SECONDS, PROCESSOR_SECONDS, Progress
from tests.ranks import _context
from tests.torchrun import environment


@dataclass
class Job:
    """One run.

    Attributes:
        arguments: Command-line arguments of `distmp.train`, or what the entry takes.
        entry: The function that each rank calls with the arguments, as "module:function".
        ranks: Number of ranks.
        max_restarts: Number of restarts that the agent allows.
        variables: Environment variables of the ranks.
    """

    arguments: list[str]
    entry: str = "tests.elastic:train"
    ranks: int = 2
    max_restarts: int = 0
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class Done:
    """The result of a job.

    Attributes:
        exit_codes: Exit codes of the ranks that failed in the last attempt, by rank.
        ended: Time of the end, in seconds since the epoch.
        stdout: Standard output of the ranks, ordered by attempt and rank.
        stderr: Standard error of the ranks, ordered by attempt and rank.
    """

    exit_codes: dict[int, int]
    ended: float
    stdout: str
    stderr: str


def run_jobs(jobs: Sequence[Job], directory: Path, timeout: float = 100) -> list[Done]:
    """Run jobs one after the other, each in its own directory `directory`/N.

    Args:
        jobs: The jobs.
        directory: Where.
        timeout: Seconds without progress, see `tests.progress`, after which all are killed.
    """
    agent = _context().Process(
        target=_agent, args=(list(jobs), directory, environment(), sys.path), name="agent"
    )
    agent.start()
    progress = Progress([agent.pid or 0], timeout, PROCESSOR_SECONDS)
    while agent.exitcode is None and progress.problem() is None:
        agent.join(INTERVAL_SECONDS)
    if agent.exitcode is None:
        for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
            process.kill()
        agent.join()
    output = (directory / "agent.log").read_text()
    assert agent.exitcode == 0, output + "".join(
        _logs(path, "stderr") for path in directory.iterdir()
    )
    agent.close()
    results = json.loads((directory / "results.json").read_text())
    return [
        Done(
            {int(rank): code for rank, code in exit_codes.items()},
            ended,
            _logs(directory / str(number), "stdout"),
            _logs(directory / str(number), "stderr"),
        )
        for number, (exit_codes, ended) in enumerate(results)
    ]


def _logs(directory: Path, name: str) -> str:
    files = sorted(directory.glob(f"logs/*/attempt_*/*/{name}.log"), key=_attempt_and_rank)
    return "".join(file.read_text() for file in files)


def _attempt_and_rank(file: Path) -> tuple[int, int]:
    return int(file.parts[-3].removeprefix("attempt_")), int(file.parts[-2])


def train(arguments: list[str]) -> None:
    """Run a rank of `python -m distmp.train`."""
    from distmp.process import end_process
    from distmp.train import main

    end_process(main(arguments))


def script(arguments: list[str]) -> None:
    """Run a rank of a script, given by its path and its arguments.

    The process ends without the interpreter's finalization: functions of `atexit` are not called.
    """
    sys.argv = list(arguments)
    # What is printed later, by the end of the process, is not in the rank's log.
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        sys.stderr.write(f"{end.code}\n")
        sys.exit(1)
    except Exception:  # noqa: BLE001  # the agent would write it to a file of its own
        traceback.print_exc()
        sys.exit(1)


# In the agent's process


def _agent(jobs: list[Job], directory: Path, variables: dict[str, str], path: list[str]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the tests
    log = os.open(directory / "agent.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = path
    for job in jobs:
        importlib.import_module(job.entry.partition(":")[0])  # once, not in every rank
    results = []
    for number, job in enumerate(jobs):
        job_directory = directory / str(number)
        job_directory.mkdir(exist_ok=True)
        results.append((_run(job, job_directory), time.time()))
    (directory / "results.json").write_text(json.dumps(results))


def _run(job: Job, directory: Path) -> dict[int, int]:
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torch cannot use a real GPU in a process that was forked.
    real = torch.cuda.is_available() and "FAKE_CUDA_DEVICES" not in os.environ
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.ranks,
        run_id=directory.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"is_host": True},
        local_addr="localhost",
        max_restarts=job.max_restarts,
        monitor_interval=0.05,
        start_method="spawn" if real else "fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(directory / "logs"), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, _rank)(job, directory)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _rank(job: Job, directory: Path) -> None:
    import torch

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the agent
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the fork has inherited the agent's handlers
    torch.set_num_threads(1)
    os.chdir(directory)
    sys.path.insert(0, str(directory))  # as `python -m` does
    os.environ.update(job.variables)
    module, _, function = job.entry.partition(":")
    getattr(importlib.import_module(module), function)(job.arguments)
