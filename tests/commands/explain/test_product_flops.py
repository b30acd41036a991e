"""Matrix products by format, the expected gain, and observed formats."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from distmp import cli
from distmp.commands.explain.explanation import Explanation, explain, largest_gains, predict
from distmp.commands.explain.hardware_rates import DATASHEET, MEASURED, Rates, largest_gain
from distmp.commands.explain.observe import differences
from distmp.commands.explain.product_flops import Products
from distmp.commands.explain.report import report
from distmp.commands.explain.types import expected_groups
from distmp.precision import policy as named
from distmp.precision import resolve
from tests.commands.explain.runs import CPU, policy, run

# Of the small run with one block and one microbatch: tracing a narrow layer takes a while.
TOKENS = 8 * 32
DIMENSION, HIDDEN, BLOCKS = 64, 128, 1
# Query, key, value and output; gate, up and down.
WEIGHTS = BLOCKS * (4 * DIMENSION**2 + 3 * DIMENSION * HIDDEN)
PRODUCT = 2 * TOKENS * WEIGHTS


@functools.cache
def predicted(text: str, samples: int = 8, **settings: Any) -> Products:
    batch = {"global_batch_size": samples}
    config = run(
        precision=policy(text), model={"options": {"layers": BLOCKS}}, batch=batch, **settings
    )
    return predict(config, resolve(text, CPU)[0], 1, CPU).products


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp8", {"e4m3": 1, "e4m3 x e5m2": 2}),
        ("mxfp8,wgrad=bf16", {"e4m3": 2}),
        # Its transforms are not counted.
        ("nvfp4,hp=head", {"e2m1": 3}),
        ("bf16", {}),
    ],
)
def test_narrow_products_are_counted_exactly(text: str, expected: dict[str, float]) -> None:
    found = predicted(text).flops
    narrow = {label: flops / PRODUCT for label, flops in found.items() if label.startswith("e")}
    assert narrow == expected
    # All products are counted, in whatever format.
    assert sum(found.values()) == sum(predicted("bf16").flops.values())
    assert {*found} - {*narrow} == {"bf16"}


@pytest.mark.nightly
def test_wide_products_are_the_head_and_attention() -> None:
    vocabulary = 257
    head = 3 * 2 * TOKENS * DIMENSION * vocabulary
    # Two products in forward; five in backward, which computes the scores again.
    attention = 7 * 2 * TOKENS * 32 * DIMENSION * BLOCKS
    assert predicted("fp8").flops["bf16"] == pytest.approx(head + attention, rel=0.01)


@pytest.mark.nightly
def test_products_of_many_microbatches_are_those_of_a_few() -> None:
    assert predicted("bf16", 64).flops == {"bf16": 8 * predicted("bf16").flops["bf16"]}


@pytest.mark.nightly
def test_recomputed_products_are_counted() -> None:
    found = predicted("fp8", activation_checkpointing="blocks").flops
    assert (found["e4m3"], found["e4m3 x e5m2"]) == (2 * PRODUCT, 2 * PRODUCT)


def test_the_largest_gain_is_that_of_amdahls_rule() -> None:
    rates = Rates(100, 200, 400)
    assert largest_gain(rates, 0.0, 0.0) == 1
    assert largest_gain(rates, 0.5, 0.0) == pytest.approx(1 / (0.5 + 0.25))
    assert largest_gain(rates, 0.0, 0.8) == pytest.approx(1 / (0.2 + 0.2))
    assert largest_gain(rates, 0.25, 0.5) == pytest.approx(1 / (0.25 + 0.125 + 0.125))
    assert largest_gain(Rates(100, None, None), 0.5, 0.0) is None
    assert largest_gain(Rates(100, 200, None), 0.0, 0.5) is None


def test_measured_gains_are_below_the_limit_of_the_hardware() -> None:
    for rates in DATASHEET.values():
        assert rates.fp8 is None or rates.fp8 == pytest.approx(2 * rates.bf16, rel=0.01)
        assert rates.fp4 is None or rates.fp4 == 4 * rates.bf16
    for one in MEASURED:
        assert 1 < one.narrow / one.wide < 2
        assert named(one.policy).is_narrow


def test_wide_policies_have_no_gain() -> None:
    assert largest_gains(predicted("bf16")) == {}
    assert largest_gains(Products({"e4m3": 1, "bf16": 1}, ""))["H100 SXM"] == pytest.approx(
        1.33, 0.01
    )


# The report


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
        (group.name, bool(group.narrow)): explanation.seen(group)
        for group in explanation.predicted.groups
    }
    assert groups["blocks.*.feed_forward.down", True] == "e4m3 e5m2"
    assert groups["blocks.*.feed_forward.down", False] == "bf16"


def test_products_with_other_formats_are_a_mismatch(explanation: Explanation) -> None:
    observed, fp8 = explanation.observed, explanation.policy
    assert observed is not None
    wrong = {**observed.narrow, "blocks.*.feed_forward.down": {"e4m3"}}
    assert [*differences(observed._replace(narrow=wrong), fp8)] == [
        f"blocks.*.feed_forward.down has narrow operands in e4m3, but the policy {fp8.name} "
        "specifies e4m3 and e5m2"
    ]
    none = [*differences(observed._replace(narrow={}), fp8)]
    assert len(none) == 4
    assert "has narrow operands in none" in none[0]


def test_the_report_says_what_is_narrow_and_what_it_gains(explanation: Explanation) -> None:
    text = " ".join(" ".join(report(explanation)).split())
    assert "4 of 8 linear layers have narrow products" in text
    assert "; wide: blocks.0.attention." in text
    assert "(hp=first1); the formats are those after the last of precision.phases" in text
    assert "datasheet: upper limit of the speed-up over bf16" in text
    assert "GPUs without instructions for these formats: A100" in text
    assert "wide products of backward in bf16" in text
    # The measurements are those of whole presets.
    assert "measured by" not in text
    preset = explanation._replace(policy=named("fp8"))
    assert "measured by torchao's authors, Llama 3 8B: 1.25 (fp8: tens" in " ".join(report(preset))


def test_a_step_without_wide_products_in_backward(explanation: Explanation) -> None:
    assert explanation.observed is not None
    observed = explanation.observed._replace(backward=set())
    assert "of backward" not in " ".join(report(explanation._replace(observed=observed)))


def test_gathers_in_8_bits_are_parameters(explanation: Explanation) -> None:
    rows = {
        (entry.purpose, entry.dtype): entry.nbytes for entry in explanation.predicted.communication
    }
    by_purpose = {f"{purpose} {dtype}" for purpose, dtype in rows}
    assert {
        "parameters torch.uint8",
        "parameters torch.bfloat16",
        "scales torch.float32",
    } <= by_purpose


@pytest.mark.nightly
def test_json_has_the_products(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model.options={layers: 1, dimension: 32, heads: 2}", "--strategy=single"]
    batch = ["--batch.global-batch-size=1", "--batch.microbatch-size=1"]
    assert cli.main(["explain", *sizes, *batch, "--precision.policy=mxfp8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["products"]
    assert found["flops"].keys() == {"e4m3", "bf16"}
    assert found["layers"].startswith("4 of 4 linear layers have narrow products")
    assert found["largest_gain"]["A100"] is None
    assert 1 < found["largest_gain"]["B200"] < 2


@pytest.mark.nightly
def test_large_models_with_patterns_of_blocks_are_observed_in_a_small_one() -> None:
    config = run(
        precision=policy("fp8,hp=head|first4|blocks.4.feed_forward.down"),
        model={"options": {"layers": 5, "dimension": 512, "hidden": 1024}},
        batch={"global_batch_size": 2, "microbatch_size": 1},
    )
    found = explain(replace(config, strategy="single"), 1)
    assert found.predicted.parameters > 8_000_000
    assert found.differences == []
    assert found.observed is not None


def test_groups_of_which_some_layers_are_narrow() -> None:
    sequence = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    groups = expected_groups(sequence, named("nvfp4,hp=2"), "single")
    assert [(group.name, group.narrow) for group in groups] == [("*", ("e2m1",)), ("*", ())]
