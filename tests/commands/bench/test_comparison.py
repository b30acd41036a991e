from __future__ import annotations

import json
from pathlib import Path

import pytest

from distmp.commands.bench.comparison import Comparison, PolicyRefused, PolicyResult, draw, report


def measured(last: float, milliseconds: float, memory: int, skipped: int = 0) -> PolicyResult:
    losses = (5.0, 4.0, 3.0, last)
    return PolicyResult("native", losses, (milliseconds / 1000,) * 3, memory, skipped)


def comparison(**results: PolicyResult | PolicyRefused) -> Comparison:
    return Comparison(4, 2, 0.01, results)


@pytest.mark.parametrize(
    ("results", "recommended"),
    [
        # The fastest of the accurate policies.
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.01, 6, 90)}, "bf16"),
        # Not an inaccurate one, even if it is faster.
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.1, 6, 90)}, "fp32"),
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(float("nan"), 6, 90)}, "fp32"),
        # Of equally fast ones, the one with least memory.
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.0, 10.4, 50)}, "bf16"),
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.0, 10.6, 50)}, "fp32"),
        ({"fp32": measured(float("nan"), 10, 100)}, None),
        ({"fp32": PolicyRefused("no")}, None),
        # If the first policy is refused, the next one is the reference.
        ({"fp32": PolicyRefused("no"), "bf16": measured(2.0, 10, 1)}, "bf16"),
    ],
)
def test_the_recommendation(
    results: dict[str, PolicyResult | PolicyRefused], recommended: str | None
) -> None:
    assert comparison(**results).recommendation()[0] == recommended


def test_the_table_has_a_line_for_each_policy_and_the_advice() -> None:
    compared = comparison(
        fp32=measured(2.0, 10, 3 * 2**20),
        fp16=measured(2.2, 5, 2**20, 2),
        tf32=PolicyRefused("why not"),
    )
    first, head, fp32, fp16, tf32, advice = report(compared).splitlines()
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


def test_json_and_picture(tmp_path: Path) -> None:
    compared = comparison(fp32=measured(float("inf"), 10, 1), bf16=PolicyRefused("no"))
    text = json.dumps(compared.as_json(), allow_nan=False)
    assert json.loads(text)["policies"]["fp32"]["losses"] == [5.0, 4.0, 3.0, None]
    assert json.loads(text)["policies"]["bf16"] == {"refused": "no"}
    draw(compared, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


# Noise between seeds


def held_out(loss: float) -> PolicyResult:
    return PolicyResult("native", (5.0, 4.0), (0.01,), 100, 0, loss)


def with_seeds(*seeds: float, **losses: float) -> Comparison:
    results = {name: held_out(loss) for name, loss in losses.items()}
    return Comparison(2, 1, 0.01, {**results}, tuple(map(held_out, seeds)))


def test_losses_within_the_noise_between_seeds_agree() -> None:
    # The standard deviation of 2.0, 2.1 and 1.9 is 0.1.
    compared = with_seeds(2.1, 1.9, bf16=2.0, near=2.19, below=1.81, far=2.21, lower=1.79)
    assert compared.noise == pytest.approx(0.1)
    found = {name: compared.agrees(name) for name in compared.measured}
    assert found == {"bf16": True, "near": True, "below": True, "far": False, "lower": False}
    lines = report(compared).splitlines()
    assert lines[-6].startswith("noise: the held-out loss under bf16, 2.0000, has a standard dev")
    assert (
        "of 0.1000 over 3 seeds; a policy agrees if its loss differs by at most 2 of them"
        in lines[-6]
    )
    assert lines[-5:-1] == [
        "near agrees: +0.1900, 1.9 standard deviations",
        "below agrees: -0.1900, 1.9 standard deviations",
        "far DIFFERS: +0.2100, 2.1 standard deviations",
        "lower DIFFERS: -0.2100, 2.1 standard deviations",
    ]
    assert "within 1.0% and the noise between seeds; far, lower have a different loss" in lines[-1]


def test_a_policy_within_a_large_noise_needs_to_be_within_the_tolerance() -> None:
    results = {"bf16": measured(2.0, 10, 1), "fp8": measured(2.1, 5, 1)}
    compared = Comparison(4, 1, 0.01, {**results}, (measured(2.4, 9, 1), measured(1.6, 9, 1)))
    assert compared.agrees("fp8")
    assert compared.recommendation()[0] == "bf16"


def test_a_loss_that_is_not_finite_agrees_with_nothing() -> None:
    nan = float("nan")
    assert not with_seeds(2.1, 1.9, bf16=2.0, fp8=nan).agrees("fp8")
    assert not with_seeds(2.1, nan, bf16=2.0, fp8=2.0).agrees("fp8")
    found = with_seeds(2.1, nan, bf16=2.0, fp8=nan).as_json()
    assert json.loads(json.dumps(found, allow_nan=False))["noise"]["final_losses"] == [2.1, None]


def test_without_held_out_samples_the_last_steps_are_compared() -> None:
    results = {"bf16": measured(2.0, 10, 1), "fp8": measured(2.3, 10, 1)}
    compared = Comparison(4, 1, 0.01, {**results}, (measured(2.4, 9, 1), measured(1.6, 9, 1)))
    assert compared.noise == pytest.approx(0.4)
    assert compared.agrees("fp8")
    assert "noise: the loss of the last quarter under bf16" in report(compared)
