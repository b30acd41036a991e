"""A run with low-precision matmuls says so: at its start, in its records and in its manifest."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from distmp.config import load
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.quantization.linear import OPERANDS
from distmp.telemetry.console import Console
from distmp.telemetry.records import read_records
from distmp.train import main
from distmp.training.trainer import Trainer
from tests.torchrun import TINY, corpus

FORMATS = "forward e4m3, grad e5m2, wgrad e5m2, scaling tensor"
BACKEND = "6 of 8 linear layers have low-precision matmuls, emulated"
WIDE = {f"blocks.{block}.feed_forward.down": "hp=*.down" for block in range(2)}


def trained(tmp_path: Path, *arguments: str) -> str:
    """Train in `tmp_path`/run, and return the output."""
    data = corpus(tmp_path / "corpus")
    config = load(
        [
            *TINY,
            f"--data.path={data}",
            f"--run-dir={tmp_path / 'run'}",
            "--log.console=plain",
            "--log.every=3",
            *arguments,
        ]
    )
    output = io.StringIO()
    run = Trainer(config, World.current("cpu"), Console(config.log, stream=output))
    assert run.run(StopSignals())
    return output.getvalue()


@pytest.mark.nightly
def test_low_precision_run_reports_its_matmuls(tmp_path: Path) -> None:
    output = trained(tmp_path, "--steps=7", "--precision.policy=fp8,hp=*.down")
    assert f"formats: {FORMATS}; {BACKEND}; in the compute dtype: " in output
    assert "this CPU only emulates the matmuls of fp8,hp=*.down, which is slow" in output

    records = read_records(tmp_path / "run" / "steps.jsonl")
    assert [r.step for r in records if r.low_precision_operands is not None] == [1, 3, 6, 7]
    for record in (records[0], records[-1]):
        assert record.low_precision_operands is not None
        assert tuple(record.low_precision_operands) == OPERANDS
        for values in record.low_precision_operands.values():
            assert values["saturated"] == 0
            assert 0 <= values["underflowed"] < 0.5
            assert values["largest"] > 0

    (start,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["starts"]
    matmuls = start["low_precision_matmuls"]
    assert (matmuls["formats"], matmuls["high_precision"]) == ([FORMATS], WIDE)


def test_16_bit_run_records_no_matmuls(tmp_path: Path) -> None:
    assert "formats:" not in trained(tmp_path, "--steps=1", "--precision.policy=bf16")
    (record,) = read_records(tmp_path / "run" / "steps.jsonl")
    assert record.low_precision_operands is None
    (start,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["starts"]
    assert "low_precision_matmuls" not in start


# Runs with `precision.phases`: settings, records, messages, and resuming.


def run(directory: str, data: Path, *arguments: str) -> list[Any]:
    fixed = [*TINY, f"--data.path={data}", "--steps=6", f"--run-dir={directory}"]
    assert main([*fixed, "--precision.policy=fp8", *arguments]) == 0
    return read_records(Path(directory) / "steps.jsonl")


@pytest.mark.nightly
def test_records_name_policy_also_after_resume(cwd: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = corpus(cwd / "corpus")
    late = "{until_tokens: 1e12, policy: 'fp8,forward=bf16'}"
    phases = ["--precision.phases", "{until_tokens: 1, policy: bf16}", late]
    whole = run("whole", data, *phases, "--checkpoint.every=3", "--checkpoint.keep=9")
    # The first step ends the first phase, which the host knows two steps later.
    assert [record.formats for record in whole] == 2 * ["bf16"] + 4 * ["fp8,forward=bf16"]
    assert "precision.phases: policy fp8,forward=bf16 from step 3 on" in caplog.messages
    checkpoint = next((cwd / "whole" / "checkpoints").glob("*3"))
    resumed = run("resumed", data, *phases, f"--resume={checkpoint}")
    kept = [(record.loss, record.formats) for record in resumed[-3:]]
    assert kept == [(record.loss, record.formats) for record in whole[-3:]]
