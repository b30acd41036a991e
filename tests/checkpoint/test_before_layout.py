"""Configurations and checkpoints of the release before are still readable.

`before_layout/` holds a configuration with names of that release and, for two strategies, the
checkpoint of step 4 and the records of all 8 steps, as that release wrote them on 2 ranks.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from distmp.config import load
from tests.elastic import Job, run_jobs

FILES = Path(__file__).parent / "before_layout"


def test_a_configuration_with_former_names(caplog: pytest.LogCaptureFixture) -> None:
    config = load(
        ["--config", str(FILES / "config.yaml"), "--divergence.pass-over=2", "--strategy=ddp-torch"]
    )
    assert config.rank_consistency.every == 3
    assert config.divergence.skip_data_steps == 2
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "the setting divergence.pass_over is now divergence.skip_data_steps",
        "the setting lockstep is now rank_consistency",
    ]


def test_a_run_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    cases = list(itertools.permutations(("ddp", "fsdp")))
    jobs = []
    for number, (strategy, resumed) in enumerate(cases):
        shutil.copytree(FILES, tmp_path / str(number))
        shutil.copytree(FILES / strategy, tmp_path / str(number) / "runs" / strategy)
        arguments = ["--config=config.yaml", f"--strategy={resumed}", f"--run-dir=runs/{strategy}"]
        jobs.append(Job([*arguments, "--resume=auto"]))
    done = run_jobs(jobs, tmp_path)
    for number, (strategy, resumed) in enumerate(cases):
        case = f"a checkpoint of {strategy}, resumed with {resumed}"
        assert done[number].exit_codes == {}, (case, done[number].stderr)
        # Neither former names nor new settings count as changes of the run.
        lines = done[number].stdout.splitlines()
        changed = [line for line in lines if line.startswith("changed: ")]
        assert [line for line in changed if not line.startswith("changed: strategy")] == [], case
        losses = _losses(tmp_path / str(number) / "runs" / strategy)
        assert losses == pytest.approx(_losses(FILES / strategy)), case


def _losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["step"] > 4]
