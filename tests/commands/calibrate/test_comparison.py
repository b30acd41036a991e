from __future__ import annotations

import json

import pytest

from distmp.commands.calibrate.policies import Comparison, PolicyResult, report

NAN = float("nan")


def measured(last: float, milliseconds: float, memory: int, skipped: int = 0) -> PolicyResult:
    losses = (5.0, 4.0, 3.0, last)
    return PolicyResult("native", losses, (milliseconds / 1000,) * 3, memory, skipped)


def comparison(**results: PolicyResult | str) -> Comparison:
    return Comparison(4, 2, 0.01, results)


@pytest.mark.parametrize(
    ("results", "recommended"),
    [
        # The fastest of the accurate policies.
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.01, 6, 90)}, "bf16"),
        # Not an inaccurate one, even if it is faster.
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.1, 6, 90)}, "fp32"),
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(NAN, 6, 90)}, "fp32"),
        # Of equally fast ones, the one with least memory.
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.0, 10.4, 50)}, "bf16"),
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.0, 10.6, 50)}, "fp32"),
        ({"fp32": measured(NAN, 10, 100)}, None),
        ({"fp32": "no"}, None),
        # If the first policy is refused, the next one is the reference.
        ({"fp32": "no", "bf16": measured(2.0, 10, 1)}, "bf16"),
    ],
)
def test_the_recommendation(
    results: dict[str, PolicyResult | str], recommended: str | None
) -> None:
    assert comparison(**results).recommendation()[0] == recommended


def test_the_table_has_a_line_for_each_policy_and_the_advice() -> None:
    compared = comparison(
        fp32=measured(2.0, 10, 3 * 2**20),
        fp16=measured(2.2, 5, 2**20, 2),
        tf32="why not",
    )
    first, head, fp32, fp16, tf32, advice = report(compared)
    assert first == "4 steps on 2 ranks"
    assert head.split() == [
        "policy",
        "ms",
        "a",
        "step",
        "memory",
        "last",
        "loss",
        "difference",
        "skipped",
    ]
    assert fp32.split() == ["fp32", "10.0", "3.0", "MiB", "2.0000", "0.00%", "0", "native"]
    assert fp16.split() == ["fp16", "5.0", "1.0", "MiB", "2.2000", "10.00%", "2", "native"]
    assert tf32.split() == ["tf32", "refused:", "why", "not"]
    assert advice.startswith("use fp32: ")
    assert "fp16 has a different loss" in advice


def test_diverged_reference_is_named() -> None:
    assert comparison(fp32=measured(NAN, 1, 1), bf16=measured(2.0, 1, 1)).recommendation() == (
        None,
        "fp32 diverged; lower optim.lr, or use another seed",
    )
    assert comparison(fp32="no").recommendation() == (None, "no policy ran")


def test_json() -> None:
    compared = comparison(fp32=measured(float("inf"), 10, 1), bf16="no")
    text = json.dumps(compared.as_json(), allow_nan=False)
    assert json.loads(text)["policies"]["fp32"]["losses"] == [5.0, 4.0, 3.0, None]
    assert json.loads(text)["policies"]["bf16"] == {"refused": "no"}
