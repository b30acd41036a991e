from __future__ import annotations

import json
import logging

import pytest

from benchmarks.report import RESULTS
from distmp.precision import PRESETS, policy
from distmp.precision.policy import MEASURED, costs
from tests.reference import make_engine


def test_the_figures_are_those_of_the_benchmark() -> None:
    measured = json.loads((RESULTS / "precision-errors-cpu.json").read_text())["errors"]
    for key, figure in MEASURED.items():
        assert f"{measured[key]:.2g}" == f"{figure:.2g}", key


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        *((name, ["param"] if name == "bf16-pure" else []) for name in PRESETS),
        ("bf16,keep_fp32=norm|head", []),
        ("bf16,reduce=bf16", ["reduce"]),
        ("fp32,reduce=fp16,loss_scale=8", ["reduce"]),
        ("bf16,buffer=bf16,output=bf16", ["buffer", "output"]),
        ("bf16-pure,accumulate=bf16", ["param", "accumulate"]),
        ("bf16-pure,stochastic_rounding=true", []),
    ],
)
def test_every_saving_has_its_figure(text: str, saved: list[str]) -> None:
    found = costs(policy(text))
    assert [cost.partition("=")[0] for cost in found] == saved
    assert all(any(char.isdigit() for char in cost.partition(":")[2]) for cost in found)


def test_the_engine_says_what_a_policy_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "distmp"):
        make_engine(policy="bf16")
        assert caplog.messages == []
        make_engine(policy="bf16-pure,name=cheap")
    (message,) = caplog.messages
    assert message.startswith(
        "precision cheap reduces accuracy: param=bfloat16: without FP32 master"
    )
