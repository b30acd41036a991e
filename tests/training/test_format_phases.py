"""Runs with `precision.phases`: settings, records, messages, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distmp.telemetry.records import read_records
from distmp.training.train import main
from tests.torchrun import TINY, corpus


def run(directory: str, data: Path, *arguments: str) -> list[Any]:
    fixed = [*TINY, f"--data.path={data}", "--steps=6", f"--run-dir={directory}"]
    assert main([*fixed, "--precision.policy=fp8", *arguments]) == 0
    return read_records(Path(directory) / "steps.jsonl")


@pytest.mark.nightly
def test_records_name_the_policy_and_a_resumed_run_has_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    data = corpus(tmp_path / "corpus")
    late = "{until_tokens: 1e12, policy: 'fp8,forward=bf16'}"
    phases = ["--precision.phases", "{until_tokens: 1, policy: bf16}", late]
    whole = run("whole", data, *phases, "--checkpoint.every=3", "--checkpoint.keep=9")
    # The first step ends the first phase, which the host knows two steps later.
    assert [record.formats for record in whole] == 2 * ["bf16"] + 4 * ["fp8,forward=bf16"]
    assert "precision.phases: policy fp8,forward=bf16 from step 3 on" in caplog.messages
    checkpoint = next((tmp_path / "whole" / "checkpoints").glob("*3"))
    resumed = run("resumed", data, *phases, f"--resume={checkpoint}")
    kept = [(record.loss, record.formats) for record in resumed[-3:]]
    assert kept == [(record.loss, record.formats) for record in whole[-3:]]
