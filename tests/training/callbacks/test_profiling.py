"""Profiles of complete runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distmp.telemetry.profiler import measured
from distmp.telemetry.records import read_records
from distmp.train import main
from tests.elastic import Job, run_jobs
from tests.faulty_runs import ARGUMENTS
from tests.torchrun import tiny


@pytest.mark.nightly
def test_two_ranks(tmp_path: Path) -> None:
    """Two layers are large enough for several buckets, the first of which is reduced early."""
    arguments = [
        *tiny(tmp_path, f"--run-dir={tmp_path / 'run'}", "--steps=3"),
        "--model.options={layers: 2, dimension: 512, heads: 2, hidden: 2048}",
        "--profile.steps=2:3",
        "--batch.global-batch-size=4",
        "--batch.microbatch-size=1",
    ]
    (ended,) = run_jobs([Job(arguments)], tmp_path)
    assert ended.exit_codes == {}, ended.stderr
    assert "profile of steps 2 to 3 on 2 ranks, " in ended.stdout
    times = [record.step_seconds for record in read_records(tmp_path / "run/steps.jsonl")[1:]]
    for rank in range(2):
        operators = (tmp_path / f"run/profile/operators-rank{rank}.txt").read_text()
        assert "aten::mm" in operators
        trace = json.loads((tmp_path / f"run/profile/trace-rank{rank}.json").read_text())
        found = measured(trace["traceEvents"], on_cuda=False)
        assert found is not None
        # Measured with the host's clock, with a slightly earlier start.
        assert found[0] == pytest.approx(sum(times) / 2, rel=0.5)
        assert 0 < found[1] < found[0]
        events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
        backward_ends = max(
            one["ts"] + one["dur"] for one in events if "evaluate_function" in one["name"]
        )
        reductions = [one for one in events if one["name"] == "gloo:all_reduce"]
        assert len(reductions) >= 2 * 3
        assert min(one["ts"] for one in reductions) < backward_ends


@pytest.mark.nightly
def test_profile_excludes_pauses_and_keeps_losses(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validations and checkpoints between the steps are not part of them; losses stay the same."""
    fixed = tiny(cwd, "--steps=6", "--validation.every=1")
    plain = [*fixed, "--run-dir=plain"]
    profiled = [*fixed, "--run-dir=run", "--checkpoint.every=3"]
    assert main(plain) == 0
    assert main([*profiled, "--profile.steps=2:4"]) == 0
    assert f"profile of steps 2 to 4 on 1 rank, in {cwd}/run/profile" in capsys.readouterr().out
    records = [
        read_records(directory / "steps.jsonl") for directory in (Path("plain"), Path("run"))
    ]
    numbers = [[(r.loss, r.grad_norm, r.validation_loss) for r in run] for run in records]
    assert numbers[0] == numbers[1]
    trace = json.loads(Path("run/profile/trace-rank0.json").read_text())
    found = measured(trace["traceEvents"], on_cuda=False)
    assert found is not None
    # Each validation takes longer than the step before it.
    assert found[0] == pytest.approx(sum(one.step_seconds for one in records[1][1:4]) / 3, rel=0.5)
    # Resume after the steps to record.
    assert main([*profiled, "--profile.steps=1:2", "--resume=auto", "--resume-force"]) == 0
    assert "profile: nothing was recorded, step 1 did not run" in capsys.readouterr().out


@pytest.mark.usefixtures("cwd")
def test_profile_is_written_when_recorded_step_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "0 forward raise")
    assert main([*ARGUMENTS, "--profile.steps=2:5"]) == 1
    assert "ValueError: a fault of the model" in capsys.readouterr().err
    left = Path("run/profile")
    assert sorted(path.name for path in left.iterdir()) == [
        "operators-rank0.txt",
        "trace-rank0.json",
    ]
    events = json.loads((left / "trace-rank0.json").read_text())["traceEvents"]
    assert "step 2" in {event["name"] for event in events}
