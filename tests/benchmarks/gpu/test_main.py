from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import command, packages, processes
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.jobs import Machine
from benchmarks.gpu.packages import ROOT
from benchmarks.gpu.results import FAILED, PASSED, Summary
from benchmarks.gpu.slices import LARGE_BYTES, Slice, slices
from tests.torchrun import python, run


def with_arguments(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", *arguments])


def test_jobs_are_listed_and_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_arguments(monkeypatch, "--list")
    assert main() == 0
    every = capsys.readouterr().out
    assert (
        "slice 2: all tests, work after backward, the loss, traces (at most 500 s)\n  tests ("
        in every
    )
    assert "--races 'ddp bf16' 'fsdp bf16'" in every
    with_arguments(monkeypatch, "--list", "--slice", "2", "--skip", "tests", "loss", "trace_ddp")
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["slice", "step_tail", "trace_fsdp"]
    with_arguments(monkeypatch, "--list", "--only", "loss", "precision")
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["slice", "loss", "slice", "precision"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--slice 6", "--slice 6: choose one of 1 to 5"),
        ("--only motor", "unknown jobs motor; --list lists the jobs"),
        ("--only loss --slice 3", "--slice, --only and --skip leave no job"),
        ("--output /proc/x", r"--output /proc/x: cannot be created \(No such file"),
    ],
)
def test_unknown_slices_jobs_and_outputs_are_refused(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_arguments(monkeypatch, *arguments.split())
    with pytest.raises(SystemExit, match=message):
        main()


def test_missing_packages_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(packages, "NEEDED", ("torch", "not-there"))
    with_arguments(monkeypatch, "--output", str(tmp_path / "out"))
    assert main() == 1
    assert capsys.readouterr().out == "not installed: not-there; use --wheels, see docs/gpu.md\n"
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_reported_before_they_are_imported(tmp_path: Path) -> None:
    # Without the directory of installed packages.
    done = run(python("-S", "-m", "benchmarks.gpu", "--output", str(tmp_path / "out")), ROOT)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"not installed: {', '.join(packages.NEEDED)}; use --wheels")


def test_the_larger_model_is_omitted_on_a_smaller_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for memory, jobs in ((LARGE_BYTES - 1, 1), (LARGE_BYTES, 2), (None, 2)):
        monkeypatch.setattr(command, "gpus", lambda: [SimpleNamespace(memory_bytes=memory)])  # noqa: B023
        with_arguments(monkeypatch, "--list", "--slice", "3")
        assert main() == 0
        out = capsys.readouterr().out
        assert out.count("benchmarks.peers") == jobs
        assert ("peers_large is omitted: size 1.3b needs a GPU with 120 GiB" in out) == (jobs == 1)


def test_the_exit_code_and_the_end_of_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    handlers: dict[int, Any] = {}
    failing: set[str] = set()

    def run_slice(part: Slice, _: Machine, summary: Summary) -> None:
        assert calls == ["adopt"], "ranks could outlive their job"
        for job in part.jobs:
            outcome = FAILED if job.name in failing else PASSED
            summary.put(replace(summary.result(job.name), outcome=outcome))

    monkeypatch.setattr(command, "run_slice", run_slice)
    monkeypatch.setattr(processes, "adopt_orphans", lambda: calls.append("adopt"))
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    with_arguments(monkeypatch, "--slice", "1", "--output", str(tmp_path))
    assert main() == 0
    failing.add("first_steps")
    calls.clear()
    assert main() == 1
    with pytest.raises(SystemExit) as raised:
        handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert raised.value.code == 143


@pytest.mark.nightly
def test_without_a_gpu_every_job_reports_it(tmp_path: Path) -> None:
    command = python("-m", "benchmarks.gpu", "--output", str(tmp_path))
    done = run(command, ROOT, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1, done.stderr
    results = json.loads((tmp_path / "summary.json").read_text())
    jobs = [job.name for part in slices("350m", "1.3b", tmp_path) for job in part.jobs]
    assert [result["job"] for result in results] == jobs
    for result in results:
        assert result["outcome"] == "not reached"
        assert result["cause"].startswith("needs a GPU; torch 2.")
    assert (tmp_path / "summary.md").read_text() in done.stdout
