"""Profiles of complete runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distmp.cli import main as distmp
from distmp.telemetry import read_records
from distmp.telemetry.exposed_communication import Summary
from distmp.training.train import main
from tests.elastic import Job, run_jobs
from tests.faulty_runs import ARGUMENTS
from tests.torchrun import TINY, corpus


@pytest.mark.nightly
def test_two_ranks(tmp_path: Path) -> None:
    """Two layers are large enough for several buckets, the first of which is reduced early."""
    arguments = [
        *TINY,
        "--model.options={layers: 2, dimension: 512, heads: 2, hidden: 2048}",
        f"--data.path={corpus(tmp_path / 'text')}",
        f"--run-dir={tmp_path / 'run'}",
        "--steps=3",
        "--profile.steps=2:3",
        "--sample.length=0",
        "--batch.global-batch-size=4",
        "--batch.microbatch-size=1",
    ]
    (ended,) = run_jobs([Job(arguments)], tmp_path)
    assert ended.exit_codes == {}, ended.stderr
    assert "profile of steps 2 to 3 on 2 ranks, " in ended.stdout
    summary = Summary.read(tmp_path / "run/profile/summary.json")
    assert [rank.rank for rank in summary.ranks] == [0, 1]
    measured = [record.step_seconds for record in read_records(tmp_path / "run/steps.jsonl")[1:]]
    for rank in summary.ranks:
        # Measured with the host's clock, with a slightly earlier start.
        assert rank.step == pytest.approx(sum(measured) / 2, rel=0.5)
        assert 0 < rank.exposed < rank.step
        operators = (tmp_path / f"run/profile/operators-rank{rank.rank}.txt").read_text()
        assert "aten::mm" in operators
        trace = json.loads((tmp_path / f"run/profile/trace-rank{rank.rank}.json").read_text())
        events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
        backward_ends = max(
            one["ts"] + one["dur"] for one in events if "evaluate_function" in one["name"]
        )
        reductions = [one for one in events if one["name"] == "gloo:all_reduce"]
        assert len(reductions) >= 2 * 3
        assert min(one["ts"] for one in reductions) < backward_ends
    # The report contains the lines of the console.
    assert distmp(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "<h2>Where the time went</h2>" in page
    for line in (summary.title, *summary.notes()):
        assert line in page
        assert line in ended.stdout


@pytest.mark.nightly
def test_pauses_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations and checkpoints between the steps are not part of them; losses stay the same."""
    monkeypatch.chdir(tmp_path)
    data = f"--data.path={corpus(tmp_path / 'corpus')}"
    fixed = [*TINY, data, "--steps=6", "--validation.every=1"]
    plain = [*fixed, "--run-dir=plain"]
    profiled = [*fixed, "--run-dir=run", "--checkpoint.every=3"]
    assert main(plain) == 0
    assert main([*profiled, "--profile.steps=2:4"]) == 0
    assert "profile of steps 2 to 4 on one rank" in capsys.readouterr().out
    records = [read_records(folder / "steps.jsonl") for folder in (Path("plain"), Path("run"))]
    numbers = [[(r.loss, r.grad_norm, r.validation_loss) for r in run] for run in records]
    assert numbers[0] == numbers[1]
    (rank,) = Summary.read(Path("run/profile/summary.json")).ranks
    measured = [record.step_seconds for record in records[1][1:4]]
    # Each validation takes longer than the step before it.
    assert rank.step == pytest.approx(sum(measured) / 3, rel=0.5)
    # Resume after the steps to record.
    assert main([*profiled, "--profile.steps=1:2", "--resume=auto", "--resume-force"]) == 0
    assert "profile: nothing was recorded, step 1 did not run" in capsys.readouterr().out


def test_a_run_that_fails_in_a_recorded_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAULT", "0 forward raise")
    assert main([*ARGUMENTS, "--profile.steps=2:5", "--log.no-files"]) == 1
    assert "ValueError: a fault of the model" in capsys.readouterr().err
    left = Path("run/profile")
    assert sorted(path.name for path in left.iterdir()) == [
        "operators-rank0.txt",
        "trace-rank0.json",
    ]
    events = json.loads((left / "trace-rank0.json").read_text())["traceEvents"]
    assert "step 2" in {event["name"] for event in events}


def test_a_profile_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.commands.report.test_report import write_run
    from tests.telemetry.samples import record

    folder = write_run(tmp_path / "run", [record(1)])
    (folder / "profile").mkdir()
    (folder / "profile/summary.json").write_text("{")
    assert distmp(["report", str(folder)]) == 2
    assert f"{folder}/profile/summary.json" in capsys.readouterr().err
