"""Tests run jobs in a separate process, because `run_job` kills all descendants of its process."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import report
from benchmarks.gpu import jobs, packages, processes
from benchmarks.gpu.jobs import Machine, run_job, run_slice
from benchmarks.gpu.results import FAILED, NOT_REACHED, PASSED, RUNNING, Result, Summary
from benchmarks.gpu.slices import Job, Slice
from tests.torchrun import python, run

DRIVER = """
from pathlib import Path
from benchmarks import report
from benchmarks import report
from benchmarks.gpu import jobs, packages, processes
from benchmarks.gpu.results import Result, Summary
from benchmarks.gpu.slices import Job, Slice

report.RESULTS = Path("results")
processes.adopt_orphans()
every = (
    Job("tests", ("pytest", "-q", "test_some.py", "--rootdir=.", "-c", "pytest.ini"), 100),
    Job("skips", ("pytest", "-q", "test_skips.py", "--rootdir=.", "-c", "pytest.ini"), 100),
    Job("breaks", ("timeit", "1 / 0"), 100),
    Job("hangs", ("timeit", "-n1", "-r1", "import time; time.sleep(600)"), 2),
    Job("measures", ("timeit", "-n1", "-r1", "open('results/it-cuda.json', 'w').write('7')"), 100),
    Job("late", ("timeit", "1"), 100),
)
summary = Summary(Path("out").resolve())
summary.put(*(Result(1, job.name, job.limit) for job in every))
jobs.ROOT = Path.cwd()
machine = jobs.Machine("a test")
jobs.run_slice(Slice("some", every[:5]), machine, summary)
jobs.run_slice(Slice("late", every[5:]), machine, summary, seconds=0)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_slice_writes_logs_outcomes_and_a_summary(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "results").mkdir()
    (tmp_path / "test_some.py").write_text("def test_one(): pass\ndef test_two(): assert 0\n")
    (tmp_path / "test_skips.py").write_text("import pytest\ndef test(): pytest.skip('no')\n")
    done = run(python("driver.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = {
        one["job"]: (one["outcome"], one["tests"], one["cause"])
        for one in json.loads((tmp_path / "out" / "summary.json").read_text())
    }
    assert found == {
        "tests": (FAILED, [1, 1, 0], "test_some.py::test_two: assert 0"),
        "skips": (FAILED, [0, 0, 1], "no test passed"),
        "breaks": (FAILED, None, "exit code 1: ZeroDivisionError: division by zero"),
        "hangs": (FAILED, None, "took longer than 2 s"),
        "measures": (PASSED, None, ""),
        "late": (NOT_REACHED, None, "no time was left"),
    }
    assert (tmp_path / "out" / "measures" / "it-cuda.json").read_text() == "7"
    assert "    | ZeroDivisionError: division by zero" in done.stdout.splitlines()
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "Jobs: 1 passed, 4 failed, 1 not reached.\n\na test\n" in text


def planned(job: Job) -> Result:
    return Result(1, job.name, job.limit)


JOB = Job("tests", ("pytest",), 50)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace processes and GPU; the items are their results and the arguments of the calls."""
    ran: dict[str, Any] = {"code": 0, "used": [0], "lines": []}

    def run(command: list[str], limit: float, log: Path, *_: object) -> int | None:
        ran["limit"] = limit
        log.write_text("the log\n")
        lines = "".join(json.dumps(line) + "\n" for line in ran["lines"])
        (log.parent / "tests.jsonl").write_text(lines)
        if isinstance(ran["code"], Exception):
            raise ran["code"]
        return ran["code"]

    def gpus() -> tuple[SimpleNamespace, ...]:
        used = ran["used"]
        return (SimpleNamespace(used_bytes=used.pop(0) if len(used) > 1 else used[0]),)

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(jobs, "gpus", gpus)
    monkeypatch.setattr(jobs, "_FREED_SECONDS", 0.1)
    return ran


GOOD = {"test": "a", "outcome": "passed"}
BAD = {"test": "b", "outcome": "failed", "cause": "wrong"}
HANGS = {"test": "c", "outcome": "running"}


@pytest.mark.parametrize(
    ("code", "lines", "cause"),
    [
        (0, [GOOD], ""),
        (1, [GOOD, BAD], "b: wrong"),
        (None, [GOOD, HANGS], "took longer than 20 s in c"),
        (None, [BAD, HANGS], "b: wrong; took longer than 20 s in c"),
        (-11, [BAD, HANGS], "b: wrong; exit code -11 in c: the log"),
        (4, [], "exit code 4: the log"),
        (0, [], "no test passed"),
        (processes.UnendedError([3, 4], 0), [GOOD], "processes 3, 4 did not end when killed"),
    ],
)
def test_the_first_cause_comes_first(
    tmp_path: Path, ran: dict[str, Any], code: object, lines: list[Any], cause: str
) -> None:
    ran.update(code=code, lines=lines)
    result = run_job(JOB, 20, tmp_path / "job", planned(JOB))
    assert (result.outcome, result.cause) == (FAILED if cause else PASSED, cause)


def test_gpu_memory_that_stays_in_use_is_a_failure(tmp_path: Path, ran: dict[str, Any]) -> None:
    ran.update(lines=[GOOD], used=[1 << 30, 3 << 30, 1 << 30])
    assert run_job(JOB, 20, tmp_path / "job", planned(JOB)).cause == "", "freed a bit later"
    ran.update(used=[1 << 30, 3 << 30])
    found = run_job(JOB, 20, tmp_path / "job", planned(JOB))
    assert found.cause == "2048 MiB of GPU memory are still in use"


def test_results_of_an_earlier_run_are_deleted(tmp_path: Path, ran: dict[str, Any]) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "old").touch()
    run_job(JOB, 20, tmp_path / "job", planned(JOB))
    assert not (tmp_path / "job" / "old").exists()


def test_results_of_other_jobs_are_not_copied(
    tmp_path: Path, ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "earlier-cuda.json").touch()
    run_job(JOB, 20, tmp_path / "job", planned(JOB))
    assert not (tmp_path / "job" / "earlier-cuda.json").exists()


def test_jobs_import_this_checkout_and_the_installed_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "own")
    monkeypatch.setattr(packages, "TARGET", tmp_path)
    expected = [str(jobs.ROOT), "own"]
    assert jobs._environment()["PYTHONPATH"].split(os.pathsep) == expected
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # what `install` does
    expected.append(str(tmp_path))
    assert jobs._environment()["PYTHONPATH"].split(os.pathsep) == expected


def test_limits_of_jobs_do_not_exceed_the_slice(tmp_path: Path, ran: dict[str, Any]) -> None:
    summary = Summary(tmp_path)
    part = Slice("one", (JOB,))
    summary.put(planned(JOB))
    run_slice(part, Machine("a test"), summary)
    assert ran["limit"] == 50
    run_slice(part, Machine("a test"), summary, seconds=30)
    assert 19 < ran["limit"] < 20


def test_without_a_gpu_each_job_reports_it(tmp_path: Path, ran: dict[str, Any]) -> None:
    summary = Summary(tmp_path)
    summary.put(planned(JOB))
    run_slice(Slice("one", (JOB,)), Machine("a test", "needs a GPU"), summary)
    assert summary.results == [replace(planned(JOB), cause="needs a GPU", machine="a test")]
    assert "limit" not in ran


def test_a_summary_keeps_other_slices_and_shows_a_killed_job(tmp_path: Path) -> None:
    first, second = Result(1, "a", 5, PASSED, 3.0, (3, 0, 1)), Result(2, "b", 5)
    Summary(tmp_path).put(second)
    Summary(tmp_path).put(first)
    Summary(tmp_path).put(replace(second, outcome=RUNNING, cause="x | y"))
    text = (tmp_path / "summary.md").read_text()
    assert [line.split(" | ")[1:3] for line in text.splitlines()[2:4]] == [
        ["a", "passed"],
        ["b", "running"],
    ]
    assert "| 3 of 5 | 3 | 0 | 1 |  |" in text
    assert r"x \| y" in text
    assert "Jobs: 1 passed, 1 running." in text
