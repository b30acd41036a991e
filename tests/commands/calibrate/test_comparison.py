from __future__ import annotations

import json

import pytest

from distmp.commands.calibrate.comparison import Comparison, PolicyRefused, PolicyResult, report

NAN = float("nan")


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
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(NAN, 6, 90)}, "fp32"),
        # Of equally fast ones, the one with least memory.
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.0, 10.4, 50)}, "bf16"),
        ({"fp32": measured(2.0, 10, 100), "bf16": measured(2.0, 10.6, 50)}, "fp32"),
        ({"fp32": measured(NAN, 10, 100)}, None),
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


def test_diverged_reference_is_named() -> None:
    assert comparison(fp32=measured(NAN, 1, 1), bf16=measured(2.0, 1, 1)).recommendation() == (
        None,
        "fp32 diverged with seed 1; lower optim.lr, or use another seed",
    )
    assert comparison(fp32=PolicyRefused("no")).recommendation() == (None, "no policy ran")


def test_json() -> None:
    compared = comparison(fp32=measured(float("inf"), 10, 1), bf16=PolicyRefused("no"))
    text = json.dumps(compared.as_json(), allow_nan=False)
    assert json.loads(text)["policies"]["fp32"]["losses"] == [5.0, 4.0, 3.0, None]
    assert json.loads(text)["policies"]["bf16"] == {"refused": "no"}


# Noise between seeds


def held_out(loss: float, accuracy: float = 0.5, seed: int = 1) -> PolicyResult:
    return PolicyResult("native", (5.0, 4.0), (0.01,), 100, 0, loss, {"accuracy": accuracy}, seed)


def over_seeds(**values: tuple[PolicyResult, ...]) -> Comparison:
    """Return a comparison of policies from the results of each by seed."""
    others = {name: of_seeds[1:] for name, of_seeds in values.items()}
    return Comparison(2, 1, 0.01, {name: found[0] for name, found in values.items()}, others)


def with_losses(**values: tuple[float, ...]) -> Comparison:
    runs = {
        name: tuple(held_out(loss, seed=seed) for seed, loss in enumerate(losses, 1))
        for name, losses in values.items()
    }
    return over_seeds(**runs)


def test_losses_within_the_noise_between_seeds_agree() -> None:
    # The standard deviation of 2.0, 2.1 and 1.9 is 0.1. Differences are those with the same seed.
    compared = with_losses(
        bf16=(2.0, 2.1, 1.9),
        near=(2.19, 2.29, 2.09),
        below=(1.81, 1.91, 1.71),
        far=(2.21, 2.31, 2.11),
        once=(2.3, 2.1, 1.9),
    )
    assert compared.noise("loss") == pytest.approx(0.1)
    found = {name: compared.agrees(name, "loss") for name in compared.measured}
    assert found == {"bf16": True, "near": True, "below": True, "far": False, "once": True}
    lines = report(compared).splitlines()
    assert lines[7].startswith("held-out loss: under bf16, a mean of 2.0000 and a standard deviat")
    assert lines[8:12] == [
        "  near agrees: +0.1900, 1.9 standard deviations",
        "  below agrees: -0.1900, 1.9 standard deviations",
        "  far DIFFERS: +0.2100, 2.1 standard deviations",
        "  once agrees: +0.1000, 1.0 standard deviations",
    ]
    assert (
        "within 1.0% and the noise between seeds; far has a different loss or metric" in lines[-1]
    )


def test_metric_outside_of_its_noise_differs() -> None:
    compared = over_seeds(
        fp32=(held_out(2.0, 0.50), held_out(2.1, 0.52), held_out(1.9, 0.48)),
        bf16=(held_out(2.0, 0.49), held_out(2.1, 0.53), held_out(1.9, 0.47)),
        fp8=(held_out(2.0, 0.45), held_out(2.1, 0.47), held_out(1.9, 0.43)),
    )
    assert compared.noise("accuracy") == pytest.approx(0.02)
    assert compared.excess("fp8", "accuracy") == pytest.approx(-0.05)
    lines = report(compared).splitlines()
    start = lines.index(next(line for line in lines if line.startswith("held-out accuracy: ")))
    assert lines[start + 1 : start + 3] == [
        "  bf16 agrees: -0.0033, 0.2 standard deviations",
        "  fp8 DIFFERS: -0.0500, 2.5 standard deviations",
    ]
    assert compared.agrees("fp8", "loss")
    assert not compared.is_accurate("fp8")
    found = compared.as_json()["policies"]["fp8"]["over_seeds"]["accuracy"]
    assert found["values"] == [0.45, 0.47, 0.43]
    assert not found["agrees"]


def test_a_policy_within_a_large_noise_needs_to_be_within_the_tolerance() -> None:
    compared = Comparison(
        4,
        1,
        0.01,
        {"bf16": measured(2.0, 10, 1), "fp8": measured(2.1, 5, 1)},
        {
            "bf16": (measured(2.4, 9, 1), measured(1.6, 9, 1)),
            "fp8": (measured(2.5, 9, 1), measured(1.7, 9, 1)),
        },
    )
    # Without held-out samples, the last steps are compared.
    assert compared.noise("loss") == pytest.approx(0.4)
    assert "loss of the last quarter: under bf16" in report(compared)
    assert compared.agrees("fp8", "loss")
    assert compared.recommendation()[0] == "bf16"


@pytest.mark.parametrize(
    ("losses", "recommended", "texts"),
    [
        (
            {"bf16": (2.0, 2.1, 1.9), "fp8": (2.0, NAN, 1.9)},
            "bf16",
            ["  fp8 DIFFERS: fp8 diverged with seed 2", "; fp8 diverged with seed 2"],
        ),
        (
            {"bf16": (2.0, NAN, 1.9), "fp8": (2.0, 2.1, 1.9)},
            None,
            ["no noise to compare with, because bf16 diverged with seed 2", "lower optim.lr"],
        ),
    ],
)
def test_a_diverged_seed_is_named(
    losses: dict[str, tuple[float, ...]], recommended: str | None, texts: list[str]
) -> None:
    compared = with_losses(**losses)
    assert compared.recommendation()[0] == recommended
    assert not compared.agrees("fp8", "loss")
    text = report(compared)
    assert all(part in text for part in texts), text
    assert "nan" not in text
    json.dumps(compared.as_json(), allow_nan=False)
