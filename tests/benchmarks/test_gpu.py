from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Job, jobs, run, run_all
from tests.progress import of_children


def test_all_jobs_exist() -> None:
    todo = jobs("350m", "1.3b")
    assert len({job.name for job in todo}) == len(todo)
    for job in todo:
        assert find_spec(job.arguments[0]), job.name
    assert [job.name for job in todo[:2]] == ["tests", "peers"]
    assert [job.name for job in jobs("350m", None)] == [job.name for job in todo[:-1]]


def test_other_jobs_run_after_a_failure_and_none_after_the_time_limit() -> None:
    ran: list[tuple[str, float]] = []

    def run(job: Job, limit: float) -> str | None:
        ran.append((job.name, limit))
        time.sleep(0.02)
        return "failed" if job.name == "first" else None

    todo = [Job("first", (), 5), Job("second", (), 500), Job("third", (), 5)]
    assert run_all(todo, 100, run) == {"first": "failed"}
    assert [name for name, _ in ran] == ["first", "second", "third"]
    assert ran[0][1] == 5
    assert 90 < ran[1][1] < 100
    ran.clear()
    assert run_all(todo, 0.01, run) == {
        "first": "failed",
        "second": "no time was left",
        "third": "no time was left",
    }


def test_a_job_that_takes_too_long_is_ended_with_its_processes(tmp_path: Path) -> None:
    (tmp_path / "slow_job.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "sys.exit(3) if sys.argv[2] == 'fail' else child.wait()\n"
    )
    for how, limit, expected in (
        ("fail", 60.0, "ended with exit code 3"),
        ("wait", 5.0, "took longer than 5 s"),
    ):
        pid_file = tmp_path / how
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
            assert run(Job("slow", ("slow_job", str(pid_file), how), 1), limit) == expected
        child = Path("/proc", pid_file.read_text(), "stat")
        progress = of_children()
        while child.exists() and child.read_text().split()[2] != "Z":
            assert progress.problem() is None, "the child is still running"
            time.sleep(0.01)


def test_problems_are_reported_and_set_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("sys.argv", ["gpu", "--only", "tests", "step_tail"])
    monkeypatch.setattr(gpu, "run", lambda job, limit: ran.append(job.name))
    assert gpu.main() == 0
    assert ran == ["tests", "step_tail", "figures"]
    monkeypatch.setattr(gpu, "run", lambda job, limit: "broke" if job.name == "tests" else None)
    capsys.readouterr()
    assert gpu.main() == 1
    assert capsys.readouterr().out == "tests broke\n"
