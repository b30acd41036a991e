"""Runs the jobs of a slice."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import report
from benchmarks.figures import ROOT
from benchmarks.gpu import packages, processes
from benchmarks.gpu.outcomes import Outcomes, cause_in
from benchmarks.gpu.results import FAILED, PASSED, RUNNING, Result, Summary
from benchmarks.gpu.slices import SLICE_SECONDS, Job, Slice
from benchmarks.gpus import gpus

# The driver may free the memory of a process some time after its end.
_FREED_SECONDS = 5.0
_FREED_BYTES = 64 * 2**20
_SHOWN_LINES = 30
# pytest's exit code if tests failed and it has reported them.
_TESTS_FAILED = 1


class Machine(NamedTuple):
    """The machine that runs the jobs.

    Attributes:
        text: Hardware, versions and date.
        problem: Why no job can run here; empty if jobs can.
    """

    text: str
    problem: str = ""

    @classmethod
    def of_this_process(cls) -> Machine:
        """Return the machine, without using memory of its GPU."""
        names = ", ".join(f"{gpu.name} (driver {gpu.driver})" for gpu in gpus()) or "no GPU"
        text = (
            f"{names}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{date.today().isoformat()}"
        )
        available = torch.cuda.is_available()
        return cls(text, "" if available else f"needs a GPU; torch {torch.__version__} finds none")


def run_slice(
    chosen: Slice, machine: Machine, summary: Summary, seconds: float = SLICE_SECONDS
) -> None:
    """Run the jobs of a slice in order; a failure does not stop the others.

    Args:
        chosen: The slice.
        machine: The machine.
        summary: Holds the planned results of the jobs, and gets their results immediately.
        seconds: Time limit for all jobs; jobs after the limit do not start.
    """
    end = time.monotonic() + seconds - processes.END_SECONDS
    for job in chosen.jobs:
        limit = min(float(job.limit), end - time.monotonic())
        planned = replace(summary.result(job.name), machine=machine.text)
        if machine.problem or limit <= 0:
            problem = machine.problem or "no time was left"
            summary.put(replace(planned, cause=problem))
            print(f"  {job.name}: {problem}", flush=True)
            continue
        print(f"  {job.name} (at most {limit:.0f} s)", flush=True)
        summary.put(replace(planned, outcome=RUNNING))
        directory = summary.directory / job.name
        result = run_job(job, limit, directory, planned)
        summary.put(result)
        print(f"    {result.outcome} in {result.seconds:.0f} s {result.cause}", flush=True)
        if result.outcome == FAILED:
            print("\n".join(_last_lines(directory / "log.txt")), flush=True)


def run_job(job: Job, limit: float, directory: Path, planned: Result) -> Result:
    """Run a job and end its processes.

    Args:
        job: The job.
        limit: Time limit in seconds.
        directory: Directory for its log, the outcomes of its tests, and copies of the results that
            it saves. Results of an earlier run are deleted.
        planned: The result before the job.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log, outcomes = directory / "log.txt", directory / "tests.jsonl"
    used, saved = _used_bytes(), _saved()
    started = time.monotonic()
    try:
        code = processes.run(_command(job, outcomes), limit, log, _environment(), ROOT)
        unended = []
    except processes.UnendedError as error:
        code, unended = error.code, [str(error)]
    seconds = time.monotonic() - started
    for path, _ in _saved() - saved:
        shutil.copy(path, directory)
    tests = Outcomes.read(outcomes) if job.has_tests else None
    problems = [*_problems(code, limit, log, tests), *unended, *_left_memory(used)]
    return replace(
        planned,
        outcome=FAILED if problems else PASSED,
        seconds=seconds,
        tests=tests and (tests.passed, tests.failed, tests.skipped),
        cause="; ".join(problems),
    )


def _command(job: Job, outcomes: Path) -> list[str]:
    command = [sys.executable, "-m", *job.arguments]
    if job.has_tests:
        # Stacks of a test that seems to hang, before its time limit.
        command += ["-o", "faulthandler_timeout=60", "-p", "pytest_timeout", "-p", "xdist.plugin"]
        command += ["-p", Outcomes.__module__, f"--outcomes={outcomes}"]
    return command


def _environment() -> dict[str, str]:
    """Return the environment of a job: this checkout and installed wheels are importable."""
    wheels = [str(packages.TARGET)] if str(packages.TARGET) in sys.path else []
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), *wheels]
    # Other installed plugins must not affect the tests.
    return {
        **os.environ,
        report.DIRECTORY: str(report.RESULTS.absolute()),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def _problems(code: int | None, limit: float, log: Path, tests: Outcomes | None) -> Iterator[str]:
    """Yield why a job failed, the first cause first."""
    where = f" in {tests.running}" if tests and tests.running else ""
    if tests and tests.cause:
        yield tests.cause
    if code is None:
        yield f"took longer than {limit:.0f} s{where}"
    elif code and not (tests and tests.cause and code == _TESTS_FAILED):
        yield f"exit code {code}{where}: {cause_in(log.read_text(errors='replace'))}"
    elif tests and not tests.passed and not tests.cause:
        yield "no test passed"


def _left_memory(before: int | None) -> Iterator[str]:
    """Yield a problem if more GPU memory stays in use than before the job."""
    end = time.monotonic() + _FREED_SECONDS
    while before is not None and (left := (_used_bytes() or 0) - before) > _FREED_BYTES:
        if time.monotonic() > end:
            yield f"{left >> 20} MiB of GPU memory are still in use"
            return
        time.sleep(0.5)


def _used_bytes() -> int | None:
    """Return the GPU memory in use by all processes; None if unknown."""
    used = [gpu.used_bytes for gpu in gpus() if gpu.used_bytes is not None]
    return sum(used) if used else None


def _saved() -> set[tuple[Path, int]]:
    """Return the saved results and when they were written."""
    return {(path, path.stat().st_mtime_ns) for path in report.RESULTS.glob("*-cuda.json")}


def _last_lines(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [f"    | {line}" for line in lines[-_SHOWN_LINES:]]
