"""Comparisons of policies, on the same steps and over seeds."""

from __future__ import annotations

import json
import math

import pytest

from distmp.commands.calibrate.policies import Comparison, PolicyResult, SeedComparison, report
from distmp.commands.calibrate.settings import CalibrationConfig
from distmp.errors import ConfigError

NAN = float("nan")


def measured(last: float, milliseconds: float, memory: int, skipped: int = 0) -> PolicyResult:
    losses = (5.0, 4.0, 3.0, last)
    return PolicyResult("native", losses, milliseconds / 1000, memory, skipped)


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
def test_recommended_policy_follows_results(
    results: dict[str, PolicyResult | str], recommended: str | None
) -> None:
    assert comparison(**results).recommendation()[0] == recommended


def test_last_loss_is_that_of_applied_steps() -> None:
    losses = (5.0,) * 6 + (NAN, 2.0)
    assert PolicyResult("native", losses, 1.0, 1, 1).last_loss == 2.0
    assert math.isnan(PolicyResult("native", (*losses, NAN, NAN), 1.0, 1, 3).last_loss)


def test_table_lists_each_policy_and_advice() -> None:
    compared = comparison(
        fp32=measured(2.0, 10, 3 * 2**20), fp16=measured(2.2, 5, 2**20, 2), tf32="why not"
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
    assert "the loss is another one under fp16" in advice


def test_diverged_reference_is_named() -> None:
    assert comparison(fp32=measured(NAN, 1, 1), bf16=measured(2.0, 1, 1)).recommendation() == (
        None,
        "fp32 diverged; lower optim.lr, or use another seed",
    )
    seeds = SeedComparison({"fp32": {"loss": [2.0, NAN, 2.0]}})
    results: dict[str, PolicyResult | str] = {"fp32": measured(2.0, 1, 1), "bf16": "no"}
    _, advice = Comparison(3, 1, 0.01, results, seeds).recommendation()
    assert advice.startswith("fp32 diverged; ")
    assert comparison(fp32="no").recommendation() == (None, "no policy ran")


def test_comparison_converts_to_strict_json() -> None:
    compared = comparison(fp32=measured(float("inf"), 10, 1), bf16="no")
    text = json.dumps(compared.as_json(), allow_nan=False)
    assert json.loads(text)["policies"]["fp32"]["losses"] == [5.0, 4.0, 3.0, None]
    assert json.loads(text)["policies"]["bf16"] == {"refused": "no"}


# Policies are compared over seeds, with the spread of the reference.


# Standard deviations of 0.1 and 0.01.
FP32 = {"loss": [2.0, 2.1, 1.9], "accuracy": [0.50, 0.51, 0.49]}


def shifted(loss: float, accuracy: float) -> dict[str, list[float]]:
    return {
        "loss": [value + loss for value in FP32["loss"]],
        "accuracy": [value + accuracy for value in FP32["accuracy"]],
    }


@pytest.mark.parametrize(
    ("loss", "accuracy", "agrees"),
    [(0.19, -0.019, True), (0.21, 0.0, False), (0.0, -0.021, False), (math.nan, 0.0, False)],
)
def test_policy_within_seed_spread_agrees(loss: float, accuracy: float, agrees: bool) -> None:
    compared = SeedComparison({"fp32": FP32, "bf16": shifted(loss, accuracy)})
    assert compared.noise("loss") == pytest.approx(0.1)
    assert compared.agrees("bf16") == agrees
    assert ("DIFFERS" in "\n".join(compared.report())) == (not agrees)
    assert compared.as_json()["bf16"]["agrees"] == agrees


def test_policy_outside_seed_spread_is_not_recommended() -> None:
    result = PolicyResult("native", (2.0, 2.0, 2.0), 1.0, 100, 0)
    results: dict[str, PolicyResult | str] = {
        "fp32": result,
        "bf16": PolicyResult("native", (2.0, 2.0, 2.0), 0.5, 50, 0),
    }
    for accuracy, expected in ((0.0, "bf16"), (-0.1, "fp32")):
        seeds = SeedComparison({"fp32": FP32, "bf16": shifted(0.0, accuracy)})
        assert Comparison(3, 1, 0.01, results, seeds).recommendation()[0] == expected


def test_two_seeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="use 3 or more seeds"):
        CalibrationConfig(seeds=2)
