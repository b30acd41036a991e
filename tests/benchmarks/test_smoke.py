"""Every benchmark runs, and a run leaves the recorded results alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ages, guard
from benchmarks.__main__ import BENCHMARKS
from benchmarks.figures import ROOT
from benchmarks.report import DIRECTORY, RESULTS, commit


@pytest.mark.nightly
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    command = [sys.executable, "-m", "benchmarks", name, "--smoke"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", DIRECTORY: str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert {result["machine"]["commit"] for result in saved} == {commit()}
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before


def test_results_older_than_their_code_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, first = (
        subprocess.check_output(["git", *words], cwd=ROOT, text=True).split()[0]
        for words in (["rev-parse", "HEAD"], ["rev-list", "--max-parents=0", "HEAD"])
    )
    recorded = {"new": head, "old": first, "lost": "0" * 12, "dirty": f"{head}-dirty", "no": None}
    for name, known in recorded.items():
        (tmp_path / f"{name}-cpu.json").write_text(json.dumps({"machine": {"commit": known}}))
    monkeypatch.setattr(ages, "RESULTS", tmp_path)
    assert [line.partition("-cpu")[0] for line in ages.older()] == ["dirty", "lost", "no", "old"]


@pytest.mark.parametrize(
    ("ratio", "more", "code"), [(1.14, 0, 0), (1.16, 0, 2), (1.0, 1, 2), (1.0, -1, 0)]
)
def test_guard_fails_if_every_attempt_is_slower(
    ratio: float, more: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    found = guard.Compared(ratio, guard.MORE_FAULTS + more)
    monkeypatch.setattr(guard, "measure", lambda *_: attempts.append(1) or found)
    monkeypatch.setattr(guard, "RESULTS", tmp_path)
    monkeypatch.setattr(guard, "save", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["guard"])
    assert guard.main() == code
    assert len(attempts) == (2 if code == 0 else 2 * guard.ATTEMPTS)
