"""All processes of a job end with it. Each test runs in a process without other descendants."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import processes
from tests.progress import wait_until
from tests.torchrun import environment, python, run

# Like a rank of torchrun: in a new session; it ignores SIGTERM.
RANK = """
import os, pathlib, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
def wait_for_other_ranks():
    time.sleep(600)
wait_for_other_ranks()
"""
JOB = """
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "rank.py", sys.argv[1]], start_new_session=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
if sys.argv[2] == "fail":
    sys.exit(3)
time.sleep(600)
"""
DRIVER = """
import os, pathlib, signal, sys
from benchmarks.gpu import processes
processes.adopt_orphans()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
command = [sys.executable, "job.py", *sys.argv[1:3]]
directory = pathlib.Path.cwd()
print(processes.run(command, float(sys.argv[3]), directory / "log.txt", os.environ, directory))
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, text in (("rank", RANK), ("job", JOB), ("driver", DRIVER)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def check_rank_ended(directory: Path) -> None:
    pid = int((directory / "pid").read_text())
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return
    subprocess.run(["kill", "-KILL", str(pid)])
    assert state in "ZX", "a rank in a session of its own outlived its job"


def run_driver(directory: Path, how: str, limit: int) -> str:
    done = run(python("driver.py", "pid", how, str(limit)), directory)
    check_rank_ended(directory)
    return done.stdout + done.stderr


def test_ranks_in_sessions_of_their_own_end_with_a_job(directory: Path) -> None:
    assert run_driver(directory, "fail", 60) == "3\n"


@pytest.mark.nightly
@pytest.mark.slow
def test_ranks_in_sessions_of_their_own_end_at_the_limit(directory: Path) -> None:
    assert run_driver(directory, "wait", 10) == "None\n"
    assert "in wait_for_other_ranks" in (directory / "log.txt").read_text(), "no stacks"
    assert not list(directory.glob("core*"))


def test_ranks_end_when_the_command_is_terminated(directory: Path) -> None:
    with subprocess.Popen(
        python("driver.py", "pid", "wait", "600"), cwd=directory, env=environment()
    ) as driver:
        wait_until((directory / "pid").exists)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait() == 7
    check_rank_ended(directory)


def test_processes_that_start_while_others_are_killed_end_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = iter([["first"], ["second"], [], []])
    killed: list[str] = []
    monkeypatch.setattr(processes, "_descendants", lambda: next(found))
    monkeypatch.setattr(processes, "_signal", lambda process, _: killed.append(process))
    monkeypatch.setattr(psutil, "wait_procs", lambda *_, **__: None)
    assert processes.end_descendants() == []
    assert killed == ["first", "second"]


def test_a_process_that_does_not_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[object] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 9))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    monkeypatch.setattr(processes, "end_descendants", lambda: [7, 8])
    command = ["sh", "-c", "exit 3"]
    with pytest.raises(processes.UnendedError, match=r"^processes 7, 8 did not end") as raised:
        processes.run(command, 60, tmp_path / "log.txt", os.environ, tmp_path)
    assert raised.value.code == 3
    assert limits == [(resource.RLIMIT_CORE, (0, 9))], "an aborted process would write a core file"
