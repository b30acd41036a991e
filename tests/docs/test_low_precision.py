"""The statements of the pages on low precision and optimizers about measured losses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "low-precision.md").read_text()


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
    assert found["steps"] >= 300
    assert all(len(losses) >= 3 for losses in found["losses"].values())
    return found


@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise", "mxfp8"])
def test_losses_in_8_bits_agree_with_bf16(name: str) -> None:
    assert abs(result("narrow-formats-cpu")["differences"][name]["largest"]) < 0.005


def test_late_switch_recovers_gap_as_on_page() -> None:
    losses = {
        name: mean(values) for name, values in result("narrow-formats-1m-cpu")["losses"].items()
    }
    wide, low_precision = losses["bf16"], losses["nvfp4,hp=head"]
    recovered = [
        (low_precision - losses[f"nvfp4,hp=head, switch at {part}%"]) / (low_precision - wide)
        for part in (80, 65)
    ]
    said = re.search(r"recovers (\d+)% of\s+the gap, and one after 65% recovers (\d+)%", PAGE)
    assert said is not None
    assert [f"{share:.0%}" for share in recovered] == [f"{share}%" for share in said.groups()]
    assert recovered[1] > 2 / 3


def test_stochastic_rounding_replaces_master_weights() -> None:
    found = result("lean-state-cpu")
    assert found["bytes"]["bf16-pure, stochastic"] < 6.01
    assert abs(found["differences"]["bf16-pure, stochastic"]["mean"]) < 0.002
    assert found["differences"]["bf16-pure"]["mean"] > 0.005
