"""Runs whose narrow products change their formats: settings, records, messages, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distmp.telemetry import read_records
from distmp.training.train import main
from tests.torchrun import TINY, corpus

PHASES = [
    "--precision.policy=fp8",
    "--precision.phases",
    "{after_steps: 0, forward: bf16, grad: bf16, wgrad: bf16}",
    "{after_steps: 2}",
    "{after_fraction: 0.75, forward: bf16}",
]


PREFIX = "precision.phases"


def run(folder: str, data: Path, *arguments: str, last: str = "") -> list[Any]:
    fixed = [*TINY, f"--data.path={data}", "--steps=8", f"--run-dir={folder}"]
    phases = [*PHASES, last] if last else PHASES
    assert main([*fixed, *phases, *arguments]) == 0
    return read_records(Path(folder) / "steps.jsonl")


def test_records_name_the_phase_and_a_resumed_run_has_the_same_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = corpus(tmp_path / "corpus")
    never = "{after_tokens: 1e12, grad: bf16}"
    whole = run("whole", data, "--checkpoint.every=5", "--checkpoint.keep=9", last=never)
    assert [record.formats["phase"] for record in whole] == [1, 1, 2, 2, 2, 2, 3, 3]
    changes = [(record.step, *record.formats["changes"]) for record in whole]
    prefix = f"{PREFIX}: from step"
    assert [change for change in changes if len(change) > 1] == [
        (1, f"{prefix} 1 on, the formats are forward=bf16, grad=bf16, wgrad=bf16"),
        (3, f"{prefix} 3 on, the formats are forward=e4m3, grad=e5m2, wgrad=e5m2"),
        (7, f"{prefix} 7 on, the formats are forward=bf16, grad=e5m2, wgrad=e5m2"),
    ]
    assert sum(record.message.startswith(prefix) for record in caplog.records) == 3
    unreached = (
        f"{PREFIX}: the run ended before {{'after_tokens': 1000000000000.0, 'grad': 'bf16'}}"
    )
    assert unreached in capsys.readouterr().out
    checkpoint = next((tmp_path / "whole" / "checkpoints").glob("*5"))
    resumed = run("resumed", data, f"--resume={checkpoint}")
    assert [record.loss for record in resumed[-3:]] == [record.loss for record in whole[-3:]]
    assert [record.formats["phase"] for record in resumed[-3:]] == [2, 3, 3]
