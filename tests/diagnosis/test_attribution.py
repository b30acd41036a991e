from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from distmp.diagnosis.attribution import (
    ForwardOverflow,
    OverflowContext,
    OverflowReport,
    ParameterOverflow,
    RankOverflowStats,
    diagnose,
)
from distmp.diagnosis.histogram import ExponentHistogram, count_exponents

AFTER_UPDATES = "lower the learning rate; if that does not help, "
IF_DIVERGING = "if the loss was rising, lower the learning rate; otherwise "


def make_context(**changes: Any) -> OverflowContext:
    values: dict[str, Any] = {
        "scale": 65536.0,
        "weight": 8.0,
        "floor": 1.0,
        "compute_dtype": torch.float16,
        "reduce_dtype": torch.float32,
        "has_masters": True,
        "has_updates": True,
        "exact": True,
    }
    return OverflowContext(**{**values, **changes})


def make_stats(*values: float, **changes: Any) -> RankOverflowStats:
    """Return statistics of a rank for two microbatches with the finite gradients `values`."""
    evidence: dict[str, Any] = {
        "losses": [1.0, 2.0],
        "repeated_losses": [1.0, 2.0],
        "bad_inputs": [0, 0],
        "bad_rows": [[], []],
        "forward": [None, None],
        "bad_parameters": [],
        "bad_weights": [],
        "loss_weights": [4.0, 4.0],
        "overflowing_weights": [],
        "parameters": [],
        "largest": max(values, default=0.0),
        "histogram": ExponentHistogram(count_exponents(torch.tensor(values))),
        "largest_at_lowest": 1.0,
    }
    return RankOverflowStats(**{**evidence, **changes})


def overflow(name: str = "layers.3.weight", rank: int = 0, inf: int = 2) -> ParameterOverflow:
    module = name.rpartition(".")[0]
    return ParameterOverflow(name, module, rank, 1, inf=inf, nan=1, largest_finite=512.0)


def test_scale_too_high() -> None:
    ranks = [make_stats(0.5), make_stats(0.5, parameters=[overflow(rank=1)], largest_at_lowest=3.0)]
    report = diagnose(ranks, make_context())
    # 65504 / 3 is between 2^14 and 2^15.
    assert (report.cause, report.fitting_scale) == ("scale_too_high", 2.0**14)
    assert str(report) == (
        "loss scale 2^16 was too high: the parameters' gradients fit at 2^14; first in the "
        "gradient of 'layers.3.weight' (2 inf, 1 NaN, largest finite 512) on rank 1 of 2 only, "
        "microbatch 1; nothing to do: the loss scale is lowered automatically"
    )
    assert (report.ranks, report.microbatch, report.module) == ((1,), 1, "layers.3")
    assert report.parameters == (overflow(rank=1),)


@pytest.mark.parametrize(
    ("floor", "advice"),
    [
        (None, "lower the loss scale (init), or make it dynamic"),
        (2.0**15, f"{IF_DIVERGING}lower min_scale = 32768, or use a bf16 policy"),
        (2.0**14, "nothing to do: the loss scale is lowered automatically"),
    ],
)
def test_advice_depends_on_loss_scale_rules(floor: float | None, advice: str) -> None:
    evidence = make_stats(0.5, parameters=[overflow()], largest_at_lowest=3.0)
    report = diagnose([evidence], make_context(floor=floor))
    assert (report.cause, report.advice) == ("scale_too_high", advice)


def test_fitting_scale_is_below_overflowing_scale() -> None:
    # The gradients of parameters are small; the gradient of an activation overflowed.
    report = diagnose([make_stats(parameters=[overflow()], largest_at_lowest=1e-6)], make_context())
    assert report.fitting_scale == 2.0**15


def test_range_too_wide_at_the_lowest_scale() -> None:
    ranks = [make_stats(0.5), make_stats(parameters=[overflow(rank=1)], largest_at_lowest=math.inf)]
    report = diagnose(ranks, make_context())
    assert (report.cause, report.fitting_scale, report.lost_share) == ("range_too_wide", None, None)
    assert "overflow even at loss scale 1" in report.diagnosis
    assert report.advice.startswith(f"{IF_DIVERGING}use a bf16 policy")


def test_nan_without_inf_is_no_problem_of_range() -> None:
    only_nan = overflow(inf=0)
    stats = make_stats(parameters=[only_nan], largest_at_lowest=math.inf)
    report = diagnose([stats], make_context())
    assert report.cause == "backward"
    assert "its gradient is NaN, even at loss scale 1" in report.diagnosis
    assert report.advice.startswith(f"{AFTER_UPDATES}look for a division by zero or the root of")
    # A lower scale helps: an activation's gradient has overflowed.
    report = diagnose([dataclasses.replace(stats, largest_at_lowest=1.0)], make_context())
    assert report.cause == "scale_too_high"


@pytest.mark.parametrize(("small", "cause"), [(5, "range_too_wide"), (4, "scale_too_high")])
def test_range_is_too_wide_if_most_gradients_underflow(small: int, cause: str) -> None:
    # At scale 2^1, where the largest value fits, 2^-11 becomes 2^-26.
    evidence = make_stats(
        *[2.0**-11] * small, *[1.0] * 4, parameters=[overflow()], largest_at_lowest=30000.0
    )
    report = diagnose([evidence], make_context())
    assert (report.cause, report.fitting_scale) == (cause, 2.0)
    assert report.lost_share == small / (small + 4)
    assert ("where 56% become zero" in report.diagnosis) == (cause == "range_too_wide")


@pytest.mark.parametrize(
    ("origin", "place", "module"),
    [
        (ForwardOverflow("layers.3", "output"), ", first at the output of 'layers.3'", "layers.3"),
        (ForwardOverflow("layers.3", "input"), ", first at the input of 'layers.3'", "layers.3"),
        (ForwardOverflow("", "output"), ", first at the output of the model", ""),
        (None, ", but the outputs of all modules are", None),
    ],
)
def test_overflow_in_forward_is_attributed(
    origin: ForwardOverflow | None, place: str, module: str | None
) -> None:
    losses = [1.0, math.inf]
    bad = make_stats(
        losses=losses, repeated_losses=losses, forward=[None, origin], parameters=[overflow()]
    )
    report = diagnose([bad, make_stats(), bad], make_context())
    assert report.cause == "forward"
    assert report.diagnosis == (
        f"overflow in the forward pass: the loss itself is not finite{place} on ranks 0, 2 of 3, "
        "microbatch 1"
    )
    assert (report.module, report.microbatch, report.ranks) == (module, 1, (0, 2))
    advice = "look for an overflow" if origin is None else "use a bf16 policy"
    assert report.advice.startswith(f"{IF_DIVERGING}{advice}")
    assert ("loss function" in report.advice) == (origin is None)


SUSPECTS = ("changed in place", "a race or a non-deterministic operation", "memory or hardware")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_finite_on_repetition_does_not_blame_function(loss: float, exact: bool) -> None:
    bad_stats = make_stats(losses=[1.0, loss], repeated_losses=[1.0, 2.25])
    report = diagnose([make_stats(), bad_stats], make_context(exact=exact))
    moved = "" if exact else " (one update has changed the weights since then)"
    assert report.diagnosis == (
        f"an overflow that did not recur when the step was repeated{moved}: the loss was {loss:g}, "
        "and 2.25 in the repetition on rank 1 of 2 only, microbatch 1"
    )
    assert (report.cause, report.ranks, report.microbatch) == ("not_repeated", (1,), 1)
    assert all(suspect in report.advice for suspect in SUSPECTS)
    assert "loss function" not in report.advice


def test_loss_non_finite_only_on_repetition() -> None:
    odd = make_stats(repeated_losses=[math.nan, 2.0], parameters=[overflow()])
    report = diagnose([odd], make_context())
    assert (report.cause, report.microbatch) == ("not_repeated", 0)
    assert report.diagnosis == (
        "the step and its repetition differ: the loss was 1, and nan in the repetition, "
        "microbatch 0"
    )
    assert all(suspect in report.advice for suspect in SUSPECTS)


def test_recurring_loss_precedes_one_that_does_not_recur() -> None:
    bad = [1.0, math.nan]
    report = diagnose(
        [make_stats(losses=bad), make_stats(losses=bad, repeated_losses=bad)], make_context()
    )
    assert (report.cause, report.ranks) == ("forward", (1,))


@pytest.mark.parametrize("has_masters", [True, False])
def test_advice_mentions_copies_of_master_weights(has_masters: bool) -> None:
    for bad_stats in (make_stats(1.0), make_stats(losses=[math.nan, 1.0])):
        report = diagnose([bad_stats], make_context(has_masters=has_masters))
        assert report.cause == "not_repeated"
        assert ("copied from FP32 master weights after every step" in report.advice) == has_masters


def test_non_finite_input_precedes_its_effects() -> None:
    bad_stats = make_stats(
        losses=[1.0, math.nan],
        bad_inputs=[0, 7],
        bad_rows=[[], [2, 5]],
        forward=[None, ForwardOverflow("first", "input")],
        parameters=[overflow()],
        largest_at_lowest=math.inf,
    )
    report = diagnose([make_stats(), bad_stats], make_context())
    assert (report.cause, report.ranks, report.microbatch) == ("bad_input", (1,), 1)
    assert "7 inf or NaN among the floating-point values of the batch" in report.diagnosis
    assert report.advice.endswith("samples: on rank 1 in microbatch 1, first rows 2, 5")


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -4.0])
def test_non_finite_loss_weight_is_attributed(weight: float) -> None:
    evidence = [make_stats(), make_stats(parameters=[overflow()], loss_weights=[4.0, weight])]
    report = diagnose(evidence, make_context(weight=weight))
    assert (report.cause, report.ranks, report.microbatch) == ("bad_weight", (1,), 1)
    assert f"add up to {weight:g}" in report.diagnosis


@pytest.mark.parametrize(
    ("held", "diagnosis", "advice", "holders"),
    [
        (
            {"bad_weights": ["head.weight"], "overflowing_weights": ["head.weight"]},
            "parameter 'head.weight' itself holds inf or NaN on rank 2 of 3 only",
            "earlier checkpoint",
            (2,),
        ),
        (
            {"overflowing_weights": ["head.weight"]},
            "parameter 'head.weight' is inf: its FP32 master weight is beyond the range of float16 "
            "on rank 2 of 3 only",
            "use a bf16 policy",
            (2,),
        ),
        (
            {"bad_weights": ["another"]},
            "the FP32 master weight of 'head.weight' is finite, but the parameter holds inf or NaN "
            "on ranks 0, 2 of 3",
            "copied from its FP32 master weight after every step",
            (0, 2),
        ),
    ],
)
def test_non_finite_parameter_is_attributed(
    held: dict[str, Any], diagnosis: str, advice: str, holders: tuple[int, ...]
) -> None:
    bad_stats = make_stats(bad_parameters=["head.weight"], repeated_losses=[math.nan, math.nan])
    evidence = [bad_stats, make_stats(), dataclasses.replace(bad_stats, **held)]
    report = diagnose(evidence, make_context())
    assert (report.cause, report.module) == ("bad_parameter", "head")
    assert (report.diagnosis, report.ranks) == (diagnosis, holders)
    assert advice in report.advice


def test_backward_overflow_without_loss_scale() -> None:
    bad_stats = make_stats(parameters=[overflow()], largest_at_lowest=None)
    for dtype in (torch.float32, torch.bfloat16):
        for has_updates in (False, True):
            step = {"scale": 1.0, "floor": None, "compute_dtype": dtype, "has_updates": has_updates}
            report = diagnose([bad_stats], make_context(**step))
            assert (report.cause, report.fitting_scale) == ("backward", None)
            first = AFTER_UPDATES if has_updates else ""
            assert report.advice.startswith(f"{first}look for a division by zero or the root of")


def test_overflow_of_sum_over_ranks_is_attributed() -> None:
    report = diagnose(
        [make_stats(1e38), make_stats(3e38)], make_context(compute_dtype=torch.float32)
    )
    assert (report.cause, report.ranks) == ("reduction", (1,))
    assert "up to 3e+38, but their sum is beyond float32" in report.diagnosis
    report = diagnose([make_stats(4e4)] * 2, make_context(reduce_dtype=torch.float16))
    assert (report.cause, report.ranks) == ("reduction", (0, 1))
    assert "up to 4e+04, but their sum is beyond float16" in report.diagnosis


@pytest.mark.parametrize("exact", [True, False])
def test_overflow_that_does_not_recur_is_reported(exact: bool) -> None:
    report = diagnose([make_stats(1.0)] * 2, make_context(exact=exact))
    assert (report.cause, report.ranks, report.microbatch) == ("not_repeated", (), None)
    assert ("one update has changed" in report.diagnosis) == (not exact)


def test_report_names_few_parameters_and_counts_all() -> None:
    entries = [overflow(f"layers.{index}.weight") for index in range(20)]
    report = diagnose(
        [make_stats(parameters=entries), make_stats(parameters=entries[:1])], make_context()
    )
    assert report.parameters == (*entries[:8], entries[0])
    assert report.parameters_total == 20


def test_record_converts_to_json() -> None:
    report = diagnose([make_stats(parameters=[overflow()])], make_context())
    record = json.loads(json.dumps(report.to_record(), allow_nan=False))
    assert record["parameters"][0]["name"] == "layers.3.weight"
    assert record["cause"] == "scale_too_high"
    assert set(record) == {*OverflowReport.__dataclass_fields__}
