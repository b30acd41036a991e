"""The errors of formats that `distmp calibrate` prints, and the policy that it chooses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from distmp import cli
from distmp.commands.calibrate.choice import choose_policy, patterns
from distmp.commands.calibrate.command import load
from distmp.commands.calibrate.format_report import as_json, report
from distmp.commands.calibrate.formats import (
    FormatCalibration,
    FormatResult,
    measure,
    narrow_policy,
    wide_policy,
)
from distmp.diagnosis.product_errors import ProductError
from distmp.distributed.world import World
from distmp.precision import PRESETS, policy
from distmp.quantization.selection import select
from distmp.training.setup import prepare
from tests.ranks import run_ranks
from tests.torchrun import TINY, corpus

WORLD = World.current("cpu")
CPU = torch.device("cpu")


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"--data.path={corpus(tmp_path / 'corpus')}", "--calibrate-steps=4"]


# The command


@pytest.mark.nightly
def test_the_command_prints_a_policy_that_a_run_takes(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The formats are compared in every step, also with those of a run that changes them.
    changing = ["--precision.phases", "{until_tokens: 1, policy: bf16}", "--precision.policy=fp8"]
    options = [*changing, "--policies", "mxfp8,fp8", "--json"]
    assert cli.main(["calibrate", *arguments, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    assert found["formats"]["policy"] == "fp8"
    assert [*found["formats"]["errors"]] == ["fp8", "mxfp8"]
    for layers in found["formats"]["errors"].values():
        assert len(layers) == 8
        for products in layers.values():
            assert all(0 < one["error"] < 0.1 for one in products.values())
    assert [*found["policies"]] == ["mxfp8", "fp8"]


def test_layers_above_the_error_stay_wide_in_the_written_policy(arguments: list[str]) -> None:
    """The first block has values of very different magnitudes, which 4 bits cannot represent."""
    config = load(arguments)
    found = measure(config, WORLD, 2, ["fp8"])
    products = found.results["fp8"].products
    errors = {name: max(one.error or 0.0 for one in each) for name, each in products.items()}
    middle = sorted(errors.values())[len(errors) // 2]
    choice = choose_policy(found, middle)
    above = {name for name, error in errors.items() if error > middle}
    assert {*choice.above} == above
    model = prepare(config, WORLD).model
    written = policy(choice.text)
    assert {*select(model, written, []).narrow} == errors.keys() - above
    assert load([*arguments, f"--precision.policy={choice.text}"]).precision.policy == choice.text


def test_the_tables_have_the_layers_and_the_policy(arguments: list[str]) -> None:
    lines = "\n".join(
        report(measure(load(arguments), WORLD, 2, ["fp8-rowwise"]), 0.08)
    ).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("blocks.*.attention.output") for line in lines)
    assert lines[-1] == "fp8-rowwise"
    assert "8 of 8 layers of fp8-rowwise are below the error" in lines[-2]


def measured(options: list[str]) -> FormatCalibration:
    return measure(load(options), World.current("cpu"), 1, ["fp8"])


def test_ranks_measure_together_under_fsdp(arguments: list[str]) -> None:
    """The same samples give the same errors on one rank and, sharded, on two."""
    options = [*arguments, "--data.workers=0"]
    sharded, _ = run_ranks(measured, 2, [*options, "--strategy=fsdp"])
    alone = measured(options)
    assert (sharded.world_size, sharded.microbatches * 2) == (2, alone.microbatches)
    ours, theirs = (found.results["fp8"] for found in (sharded, alone))
    for layer in theirs.products:
        for one, two in zip(ours.products[layer], theirs.products[layer], strict=True):
            assert one.error == pytest.approx(two.error, rel=1e-2)


def test_a_model_without_suitable_layers_is_one_message(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--model.options={layers: 2, dimension: 24, heads: 2, hidden: 40}"]
    assert cli.main(["calibrate", *arguments, *sizes, "--policies=mxfp8"]) == 2
    error = capsys.readouterr().err
    assert "policies = 'mxfp8'" in error
    assert "which are not multiples of 32" in error
    assert error.count("\n") == 1


# The policies


def test_the_wide_policy_keeps_what_is_configured() -> None:
    configured = "fp8,keep_fp32=norm,reduce=bf16"
    wide = wide_policy(configured, CPU)
    assert not wide.is_narrow
    assert (wide.keep_fp32, wide.reduce_dtype) == (("norm",), torch.bfloat16)
    assert narrow_policy(wide, "fp8") == policy(f"{configured},name=calibrated-fp8")
    assert wide_policy("nvfp4", CPU) == wide_policy("fp32", CPU) == PRESETS["bf16"]
    assert narrow_policy(PRESETS["bf16"], "nvfp4") == PRESETS["nvfp4"]


LAYERS = [f"blocks.{block}.{part}" for block in range(3) for part in ("a", "b")]


def calibration(**errors: dict[str, tuple[float | None, ...]]) -> FormatCalibration:
    """Return measurements with the errors of the products of each layer, by preset."""
    results = {
        name: FormatResult(
            PRESETS[name],
            {
                layer: [ProductError(error, 0.0, 0.25) for error in of_layer]
                for layer, of_layer in layers.items()
            },
        )
        for name, layers in errors.items()
    }
    return FormatCalibration(3, 2, 1, PRESETS["bf16"], (*LAYERS, "head"), results, {})


def all_layers(*errors: float | None) -> dict[str, tuple[float | None, ...]]:
    return dict.fromkeys(LAYERS, errors)


GOOD, BAD = all_layers(0.05, 0.05, 0.05), all_layers(0.2, 0.2, 0.2)


def test_the_cheapest_format_below_the_error_is_chosen() -> None:
    assert choose_policy(calibration(nvfp4=GOOD, fp8=GOOD), 0.1).text == "nvfp4"
    assert choose_policy(calibration(nvfp4=BAD, fp8=GOOD), 0.1).text == "fp8"
    assert choose_policy(calibration(nvfp4=BAD, fp8=GOOD), 0.3).text == "nvfp4"
    neither = choose_policy(calibration(nvfp4=BAD, fp8=BAD), 0.1)
    assert neither.text == "bf16"
    assert "all three products of nvfp4 are above the error in most layers" in neither.reason
    # One product in 4 bits takes longer than three in 8 bits.
    one_product = all_layers(0.2, 0.2, 0.05)
    chosen = choose_policy(calibration(nvfp4=one_product, fp8=GOOD), 0.1)
    assert chosen.text == "fp8"
    assert chosen.time == pytest.approx(1 - 6 / 7 / 2)
    assert "products take longer with nvfp4 (6 of 6 layers" in chosen.reason
    assert choose_policy(calibration(nvfp4=one_product), 0.1).policy.forward_format is None


def test_a_product_that_is_the_cause_in_most_layers_becomes_wide() -> None:
    chosen = choose_policy(calibration(fp8=all_layers(0.05, 0.2, 0.05)), 0.1)
    assert chosen.policy == policy("fp8,grad=bf16,name=calibrated-fp8")
    assert policy(chosen.text) == chosen.policy
    assert chosen.reason.endswith("6 of 6 layers of fp8 are below the error without grad")


@pytest.mark.parametrize("error", [0.2, math.inf, math.nan])
def test_single_layers_above_the_error_are_named(error: float) -> None:
    layers = {**GOOD, "blocks.1.b": (0.05, 0.05, error)}
    chosen = choose_policy(calibration(fp8=layers), 0.1)
    assert chosen.policy.hp == ("head", "embedding", "blocks.1.b")
    assert policy(chosen.text) == chosen.policy
    assert [*chosen.above] == ["blocks.1.b"]


def test_a_format_is_not_used_if_most_layers_are_above_the_error() -> None:
    layers = {
        name: (0.2, 0.05, 0.05) if index < 2 else (0.05, 0.2, 0.05) if index < 4 else (0.05,) * 3
        for index, name in enumerate(LAYERS)
    }
    chosen = choose_policy(calibration(fp8=layers), 0.1)
    assert chosen.text == "bf16"
    assert chosen.reason == "4 of 6 layers are above the error with fp8"


def test_products_that_do_not_exist_are_below_the_error() -> None:
    assert choose_policy(calibration(fp8=all_layers(0.05, 0.05, None)), 0.1).text == "fp8"


def test_patterns_match_the_layers_and_no_other() -> None:
    every_a = [name for name in LAYERS if name.endswith("a")]
    assert patterns(every_a, LAYERS) == ["blocks.*.a"]
    assert patterns(every_a[:2], LAYERS) == every_a[:2]
    # `*` also matches dots.
    assert patterns(every_a, [*LAYERS, "blocks.0.inner.a"]) == every_a


# The report


def test_the_table_has_the_largest_error_of_each_group() -> None:
    layers = {**GOOD, "blocks.1.b": (0.05, 0.3, None)}
    found = calibration(fp8=layers)
    rows = [line.split() for line in "\n".join(report(found, 0.1)).splitlines()]
    shares = ["0", "25.00%"]
    assert ["blocks.*.a", "3", "0.0500", "0.0500", "0.0500", "-", *shares] in rows
    assert ["blocks.*.b", "3", "0.0500", "0.3000", "0.0500", "1", *shares] in rows


@pytest.mark.parametrize("error", [0.05, math.nan, math.inf, None])
def test_json_takes_all_errors(error: float | None) -> None:
    found = calibration(
        fp8={**GOOD, "blocks.0.a": (0.0, error, 0.5)}, nvfp4={"blocks.1.a": (1.0,) * 3}
    )
    content: dict[str, Any] = json.loads(json.dumps(as_json(found, 0.1), allow_nan=False))
    written = content["errors"]["fp8"]["blocks.0.a"]["grad"]["error"]
    assert written == (error if error in (0.05, None) else str(error))
