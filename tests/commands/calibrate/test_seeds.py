"""Policies are compared over seeds, with the spread of the reference."""

from __future__ import annotations

import math

import pytest

from distmp.commands.calibrate.policies import Comparison, PolicyResult
from distmp.commands.calibrate.seeds import SeedComparison
from distmp.commands.calibrate.settings import CalibrationConfig
from distmp.errors import ConfigError

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
def test_a_policy_agrees_if_another_seed_changes_as_much(
    loss: float, accuracy: float, agrees: bool
) -> None:
    compared = SeedComparison({"fp32": FP32, "bf16": shifted(loss, accuracy)})
    assert compared.noise("loss") == pytest.approx(0.1)
    assert compared.agrees("bf16") == agrees
    assert ("DIFFERS" in "\n".join(compared.report())) == (not agrees)
    assert compared.as_json()["bf16"]["agrees"] == agrees


def test_a_policy_outside_of_the_noise_is_not_recommended() -> None:
    result = PolicyResult("native", (2.0, 2.0, 2.0), (1.0,), 100, 0)
    results: dict[str, PolicyResult | str] = {
        "fp32": result,
        "bf16": PolicyResult("native", (2.0, 2.0, 2.0), (0.5,), 50, 0),
    }
    for accuracy, expected in ((0.0, "bf16"), (-0.1, "fp32")):
        seeds = SeedComparison({"fp32": FP32, "bf16": shifted(0.0, accuracy)})
        assert Comparison(3, 1, 0.01, results, seeds).recommendation()[0] == expected


def test_two_seeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="use 3 or more seeds"):
        CalibrationConfig(seeds=2)
