"""Observed formats of low-precision matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmp.commands.explain.explanation import Explanation, explain
from distmp.commands.explain.observe import differences
from distmp.commands.explain.report import report, seen
from tests.commands.explain.runs import policy, run


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    wide = {"until_tokens": 1e9, "policy": "bf16"}
    precision = {**policy("fp8,hp=first1"), "phases": [wide]}
    config = run(precision=precision, strategy="fsdp")
    return explain(config, 2, 2)


@pytest.mark.nightly
def test_a_real_step_matches_the_policy(explanation: Explanation) -> None:
    assert explanation.differences == []
    groups = {
        (group.name, bool(group.low_precision)): seen(explanation, group)
        for group in explanation.groups
    }
    assert groups["blocks.*.feed_forward.down", True] == "e4m3 e5m2"
    assert groups["blocks.*.feed_forward.down", False] == "bf16"


def test_products_with_other_formats_are_a_mismatch(explanation: Explanation) -> None:
    observed, groups, fp8 = explanation.observed, explanation.groups, explanation.policy
    wrong = {**observed.low_precision, "blocks.*.feed_forward.down": {"e4m3"}}
    assert [*differences(replace(observed, low_precision=wrong), groups, fp8)] == [
        f"blocks.*.feed_forward.down has low-precision operands in e4m3, but the policy {fp8.name} "
        "specifies e4m3 and e5m2"
    ]
    none = [*differences(replace(observed, low_precision={}), groups, fp8)]
    assert len(none) == 4
    assert "has low-precision operands in none" in none[0]


def test_the_report_names_low_precision_layers(explanation: Explanation) -> None:
    text = " ".join(" ".join(report(explanation)).split())
    assert "4 of 8 linear layers have low-precision matmuls" in text
    assert "; in the compute dtype: blocks.0.attention." in text
    assert "(hp=first1); the formats are those after the last of precision.phases" in text
