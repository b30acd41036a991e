"""Tables of GPU results, from made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures
from benchmarks.tables import accumulation, precision, runs, steps

MACHINE = {
    "cpu": "a CPU",
    "cores": 16,
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "date": "2026-12-01",
    "peak": {
        "flops": {"bfloat16": 1000e12, "float16": 1000e12, "tf32": 500e12, "float32": 50e12},
        "source": "NVIDIA's datasheet, dense",
        "product": {"bfloat16": 790e12, "float16": 780e12, "tf32": 400e12, "float32": 48e12},
        "bandwidth": 4.3e12,
    },
}
DDP, ENGINE = "torch DDP, bf16 parameters", "distmp.Engine, bf16, FP32 masters"


def rows(text: str) -> list[list[str]]:
    """Return the cells of the first table, without its head."""
    lines = [line for line in text.split("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def head(text: str) -> list[str]:
    return [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]


def step_result(machine: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": machine,
        "size": "350m",
        "ranks": 1,
        "microbatches": 8,
        "tokens_per_microbatch": 4096,
        "flops": 60e12,
        "memory": {DDP: {"peak": 6.0}, ENGINE: {"peak": 10.0}, "too large": {"peak": 1.0}},
        "memory_with_adamw": {"AdamW": {"1": {"peak": 20.0, "between_steps": 18.0}}},
        "references": {"autocast": "not measured", "bf16": DDP},
        "seconds": {DDP: [0.2, 0.2, 0.4], ENGINE: [0.1, 0.1, 0.3]},
    }


def test_a_step_has_its_share_of_the_peak() -> None:
    text = accumulation.accumulation_step(step_result(MACHINE))
    assert head(text) == [
        "method",
        "seconds",
        "relative to DDP autocast",
        "relative to DDP bf16",
        "TFLOP/s",
        "share of the peak",
        "peak bytes per parameter",
    ]
    # 60 TFLOP in 0.2 s and in 0.1 s, of 1,000 TFLOP/s; incomplete measurements are omitted.
    assert [row[0] for row in rows(text)] == [DDP, ENGINE]
    assert [row[2:] for row in rows(text)] == [
        ["", "1.00", "300", "30.0%", "6.0"],
        ["", "0.50", "600", "60.0%", "10.0"],
    ]
    assert "each of 1 ranks" in text
    assert text.endswith(
        "NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11.0, 2026-12-01. Its peak in bfloat16 is "
        "1,000 TFLOP/s (NVIDIA's datasheet, dense), a large product reaches 790; copies move "
        "4.30 TB/s."
    )


def test_a_cpu_has_no_peak() -> None:
    cpu = {"cpu": "a CPU", "gpu": None, "torch": "2.13.0", "date": "2026-12-01"}
    text = accumulation.accumulation_step(step_result(cpu))
    assert "share of the peak" not in head(text)
    assert text.endswith("a CPU, torch 2.13.0, 2026-12-01.")


def test_microbatches_have_error_time_and_memory_in_one_row() -> None:
    def method(factor: float) -> dict[str, Any]:
        return {
            str(count): {
                "bytes_per_parameter": 6.0 + factor,
                "error": 1e-3 * factor,
                "seconds": [count * factor, 3 * count * factor],
            }
            for count in (8, 64)
        }

    result = {
        "machine": MACHINE,
        "ranks": 1,
        "microbatches": [8, 64],
        "samples": 16,
        "parameters": 2_500_000,
        "flops": 100e12,
        "reference": DDP,
        "ways": {DDP: method(1), ENGINE: method(2), "too large": {"8": {"error": None}, "64": {}}},
    }
    text = accumulation.accumulation_microbatches(result)
    assert rows(text) == [
        [DDP, "1e-03 / 1e-03", "1.00 / 1.00", "7.0 / 7.0", "5.0% / 5.0%"],
        [ENGINE, "2e-03 / 2e-03", "2.00 / 2.00", "8.0 / 8.0", "2.5% / 2.5%"],
    ]
    assert "At 8 / 64 microbatches of 16 samples on each of 1 ranks; 2.50 M parameters" in text
    assert "the reference takes 16 / 128 s" in text


def test_host_cost_is_relative_to_ddp_and_to_the_fewest_ranks() -> None:
    result = {
        "machine": {**MACHINE, "gpu": None},
        "microbatches": 32,
        "beside_ddp": {"fp32": {"DDP": [2.0, 4.0, 3.0], "distmp": [2.2, 4.0, 3.6]}},
        "pretended": {"fp32": {"64": [2.0, 2.0, 3.0], "8": [2.0, 1.0, 2.0]}},
    }
    found = {row[0]: row[3:] for row in rows(steps.host_cost(result))}
    assert found["2"] == ["DDP, 3 (2 to 4) ms", "1.1 (1 to 1.2)"]
    assert found["64, simulated"] == ["8 ranks", "1.5 (1 to 2)"]
    assert found["8, simulated"] == ["8 ranks", "1 (1 to 1)"]


def test_cost_after_backward_is_compared_per_round() -> None:
    result = {
        "machine": {**MACHINE, "gpu": None, "threads": 2},
        "elements": 2**25,
        "milliseconds": {
            "bare fused AdamW": [1.0, 5.0, 2.0],
            "torch: unscale, clip, step": [3.0, 6.0, 6.0],
            "Engine": [2.0, 5.8, 3.0],
            "copy": [2.0] * 3,
            "norm alone": [1.0] * 3,
        },
    }
    found = {row[0]: row[2:] for row in rows(steps.step_tail(result))}
    # The ratios are 1/2, 0.8/1 and 1/4; that of the medians' differences is 1/4.
    assert found["Engine"] == ["1", "0.50 (0.25 to 0.80)", "1.0"]
    assert found["torch: unscale, clip, step"] == ["2", "1", "2.0"]


def test_time_lost_to_a_checkpoint_includes_slower_steps() -> None:
    turn = {"stall": 1.0, "written": 11.0, "step": 1.0, "step_while_writing": 2.0}
    assert runs.time_lost([turn]) == [6.0]  # 5 steps in 10 seconds, instead of 10


def test_policies_have_the_peak_of_their_kind() -> None:
    result = {
        "machine": MACHINE,
        "size": "350m",
        "steps": 30,
        "tokens": 16_000,
        "flops": 40e12,
        "kinds": {"fp32": "float32", "bf16": "bfloat16"},
        "last_losses": {"fp32": 2.5, "bf16": 2.51},
        "apart": {"fp32": 0.0, "bf16": 0.004},
        "recommended": "bf16",
        "reason": "the least memory",
        "policies": {
            "fp32": {"step_seconds": 1.0, "memory_bytes": 9e9},
            "tf32": {"refused": "no"},
            "bf16": {"step_seconds": 0.1, "memory_bytes": 8e9},
        },
    }
    assert rows(precision.policies(result)) == [
        ["`fp32`", "1e+03", "16,000", "40", "80.0%", "9,000", "2.5000", "0.00%"],
        ["`bf16`", "100", "160,000", "400", "40.0%", "8,000", "2.5100", "0.40%"],
    ]


def test_results_of_a_gpu_come_into_the_page_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    mark = "<!-- figures: every-gpu-result -->\nold\n<!-- end of figures -->"
    assert "No GPU results are available yet." in figures.with_figures(mark)
    methods = ("bare fused AdamW", "torch: unscale, clip, step", "Engine", "copy", "norm alone")
    tail = {
        "machine": {**MACHINE, "threads": 2},
        "elements": 2**28,
        "milliseconds": {method: [index + 1.0] for index, method in enumerate(methods)},
    }
    (tmp_path / "step-tail-cuda.json").write_text(json.dumps(tail))
    (tmp_path / "step-tail-cpu.json").write_text("{}")
    found = figures.with_figures(mark)
    assert "### step-tail-cuda\n\n| method |" in found
    assert "old" not in found
    assert "threads on" not in found
    assert figures.with_figures(found) == found
    named = mark.replace("every-gpu-result", "step-tail-cuda")
    assert figures.with_figures(named).count("NVIDIA H200") == 1
    missing = mark.replace("every-gpu-result", "accumulation-step-cuda")
    assert "Not measured yet." in figures.with_figures(missing)
