"""What a training run prints and records about steps that overflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from distmp.data import IGNORED
from distmp.telemetry.records import read_records
from distmp.training.train import main
from tests.elastic import Job, run_jobs
from tests.torchrun import TINY, corpus

FP16 = [*TINY, "--precision.policy=fp16", "--precision.loss-scale.init=16777216", "--run-dir=run"]


def test_a_skipped_step_is_explained_in_the_record_and_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*FP16, f"--data.path={corpus(tmp_path / 'corpus')}", "--steps=12"]) == 0
    records = read_records(tmp_path / "run" / "steps.jsonl")
    skipped = [record for record in records if record.skipped]
    assert 0 < len(skipped) < len(records)
    output = capsys.readouterr().out.splitlines()
    for record in records:
        lines = [line for line in output if line.startswith(f"step {record.step} skipped: ")]
        assert len(lines) == (1 if record.skipped else 0)
        assert (record.overflow is not None) == record.skipped
    overflow = skipped[0].overflow
    assert overflow is not None
    assert (overflow["cause"], overflow["exact"]) == ("scale_too_high", True)
    assert overflow["parameters"][0]["name"].endswith("weight")
    assert f"step 1 skipped: {overflow['diagnosis']}; {overflow['advice']}" in output
    assert sum(line.count(overflow["advice"]) for line in output) == 1 < len(skipped)


@pytest.mark.nightly
def test_a_run_that_only_skips_ends_with_one_message_that_names_the_layer(tmp_path: Path) -> None:
    fixed = "--precision.policy=fp16,loss_scale=16777216"
    data = f"--data.path={corpus(tmp_path / 'corpus')}"
    (done,) = run_jobs([Job([*FP16, fixed, data, "--steps=60"])], tmp_path)
    assert 1 in done.exit_codes.values(), done
    messages = [line for line in done.stderr.splitlines() if line.startswith("distmp: ")]
    assert len(messages) == 1, done.stderr
    assert "max_consecutive_skips = 50: that many steps in a row" in messages[0]
    assert "loss scale 2^24 was too high" in messages[0]
    assert "first in the gradient of '" in messages[0]
    assert "on all 2 ranks" in messages[0]
    assert "lower precision.loss_scale.init" in messages[0]
    assert len(read_records(tmp_path / "0" / "run" / "steps.jsonl")) == 50


class AllIgnored:
    """Samples without a target that counts."""

    vocabulary_size = 50

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": torch.arange(32), "targets": torch.full((32,), IGNORED)}


def all_ignored(split: str, sequence_length: int) -> AllIgnored:
    return AllIgnored()


def test_a_run_without_targets_says_that_it_trains_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [f"--data.source={__name__}:all_ignored", "--sample.length=0"]
    assert main([*TINY, *data, "--steps=2", "--run-dir=run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " skipped: " in line]
    assert [line.split(":")[0] for line in lines] == ["step 1 skipped", "step 2 skipped"]
    assert all("the global weight is 0" in line for line in lines)
    assert ["check that batches have targets" in line for line in lines] == [True, False]
    warning = caplog.records[-1].getMessage()
    assert "all 2 steps were skipped, so the weights after step 2 are the initial ones" in warning
