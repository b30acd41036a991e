from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distmp.errors import ConfigError
from distmp.telemetry.profiling import Overlap, overlap
from distmp.telemetry.settings import ProfileConfig
from tests.torchrun import TINY, corpus, run, torchrun


def event(name: str, start: float, stop: float, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": stop - start}


BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def test_gloo_is_hidden_behind_backward() -> None:
    events = [
        event(BACKWARD, 0, 10),
        event(BACKWARD, 5, 20),
        event("gloo:all_reduce", 15, 25),
        event("gloo:all_reduce", 22, 30),
        event("aten::mm", 26, 30),
        {"ph": "M", "name": "gloo:metadata"},
    ]
    assert overlap(events) == Overlap(total=pytest.approx(15e-6), hidden=pytest.approx(5e-6))


def test_nccl_is_hidden_behind_other_kernels() -> None:
    events = [
        event(BACKWARD, 0, 100),
        event("ncclDevKernel_AllReduce", 10, 30, "kernel"),
        event("gemm", 0, 15, "kernel"),
        event("gemm", 25, 40, "kernel"),
    ]
    found = overlap(events)
    assert found == Overlap(total=pytest.approx(20e-6), hidden=pytest.approx(10e-6))
    assert str(found) == "0.02 ms of communication, 50% of it during computation"


def test_no_communication() -> None:
    assert str(overlap([event(BACKWARD, 0, 1)])) == "0 ms of communication"


@pytest.mark.parametrize(("setting", "value"), [("first_step", -1), ("steps", 0)])
def test_settings_out_of_range(setting: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"profile\.{setting} = {value}"):
        ProfileConfig(**{setting: value})


def test_a_run_writes_the_trace_of_a_step(tmp_path: Path) -> None:
    """Two layers of some size, so that there are several buckets and the first is early."""
    ended = run(
        torchrun(
            *TINY,
            "--model.dimension=512",
            "--model.hidden=2048",
            "--model.layers=4",
            f"--data.path={corpus(tmp_path / 'text')}",
            "--run-dir=run",
            "--steps=3",
            "--profile.first-step=3",
            "--sample.length=0",
            "--batch.global-batch-size=4",
            "--batch.microbatch-size=1",
        ),
        tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "ms of communication" in ended.stdout
    for rank in range(2):
        trace = json.loads((tmp_path / f"run/profile/trace-rank{rank}.json").read_text())
        events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
        backward_ends = max(
            one["ts"] + one["dur"] for one in events if "evaluate_function" in one["name"]
        )
        reductions = [one for one in events if one["name"] == "gloo:all_reduce"]
        assert len(reductions) >= 3
        assert min(one["ts"] for one in reductions) < backward_ends
