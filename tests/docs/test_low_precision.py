"""The statements of the pages on low precision and optimizers about measured losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
    assert found["steps"] >= 300
    assert all(len(losses) >= 3 for losses in found["losses"].values())
    return found


@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise", "mxfp8"])
def test_losses_in_8_bits_agree_with_bf16(name: str) -> None:
    assert abs(result("narrow-formats-cpu")["differences"][name]["largest"]) < 0.005


def test_late_switch_recovers_a_part_of_the_loss() -> None:
    differences = result("narrow-formats-cpu")["differences"]
    assert 0 < differences["nvfp4, switch at 80%"]["mean"] < differences["nvfp4"]["mean"]


def test_stochastic_rounding_replaces_master_weights() -> None:
    found = result("lean-state-cpu")
    assert found["bytes"]["bf16-pure, stochastic"] < 6.01
    assert abs(found["differences"]["bf16-pure, stochastic"]["mean"]) < 0.002
    assert found["differences"]["bf16-pure"]["mean"] > 0.005
