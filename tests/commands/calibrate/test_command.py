from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distmp.cli import main
from distmp.commands.calibrate.policies import compare
from distmp.commands.calibrate.settings import CalibrationConfig
from distmp.distributed.world import World
from tests.marks import nightly
from tests.ranks import ranks
from tests.torchrun import corpus

RUN = (
    "--model.size=1m",
    "--data.sequence-length=16",
    "--batch.global-batch-size=4",
    "--batch.microbatch-size=2",
    "--optim.lr=1e-3",
    "--schedule.warmup-steps=0",
    "--calibrate-steps=5",
)


def calibrate(*arguments: str) -> int:
    return main(["calibrate", *RUN, *arguments])


def test_policies_train_on_the_same_steps(capsys: pytest.CaptureFixture[str], cwd: Path) -> None:
    data = f"--data.path={corpus(cwd / 'corpus')}"
    assert calibrate(data, "--policies", "fp32", "tf32", "bf16-autocast", "--json", "true") == 0
    found = json.loads(capsys.readouterr().out)
    # TF32 has no effect on a CPU: identical losses, from the same weights and batches.
    policies = found["policies"]
    assert policies["fp32"]["losses"] == policies["tf32"]["losses"]
    assert policies["fp32"]["losses"] != policies["bf16-autocast"]["losses"]
    for one in policies.values():
        assert one["losses"][0] == pytest.approx(policies["fp32"]["losses"][0], rel=1e-2)
        assert (
            one["memory_bytes"] > 4 * 1_000_000 * 2
        )  # at least weights and gradients, whatever memory was free before
    assert [path.name for path in cwd.iterdir()] == ["corpus"]  # nothing else is written


def test_policy_that_skips_its_last_steps_has_diverged(
    capsys: pytest.CaptureFixture[str], cwd: Path
) -> None:
    run = [option for option in RUN if "optim.lr" not in option]
    data = f"--data.path={corpus(cwd / 'corpus')}"
    assert main(["calibrate", *run, data, "--optim.lr=1e8", "--policies=fp32"]) == 0
    assert "nothing to recommend: fp32 diverged" in capsys.readouterr().out


@pytest.mark.parametrize("seeds", [[], ["--seeds=3", "--data.held-out=0.3"]])
def test_run_that_every_policy_refuses_fails(
    seeds: list[str], capsys: pytest.CaptureFixture[str], cwd: Path
) -> None:
    data = f"--data.path={corpus(cwd / 'corpus')}"
    assert calibrate(data, "--policies=bf16,keep_fp32=nothing", *seeds) == 2
    shown = capsys.readouterr().out
    assert "refused: precision.policy.keep_fp32 = 'nothing': matches no module" in shown
    assert "nothing to recommend: no policy ran" in shown


@pytest.mark.nightly
def test_policies_are_compared_over_seeds(capsys: pytest.CaptureFixture[str], cwd: Path) -> None:
    size = ["--model.options={layers: 1, dimension: 32, heads: 2}", "--validation.samples=4"]
    data = [f"--data.path={corpus(cwd / 'corpus')}", "--data.held-out=0.3", "--steps=5"]
    options = ["--policies", "bf16,fp8", "--seeds=3", "--json", "true"]
    assert calibrate(*size, *data, *options) == 0
    found = json.loads(capsys.readouterr().out)["seeds"]
    # A training run with the third seed has the same loss and accuracy.
    run = [*RUN, *size, *data, "--precision.policy=bf16", "--seed=3", "--run-dir=run"]
    run.remove("--calibrate-steps=5")
    run += ["--validation.final-samples=4", "--validation.metrics", "{right: accuracy}"]
    assert main(["train", *run, "--log.console=plain"]) == 0
    last = json.loads(Path("run/steps.jsonl").read_text().splitlines()[-1])
    values = found["bf16"]["values"]
    assert len({*values["loss"]}) == 3
    assert values["loss"][2] == pytest.approx(last["validation_loss"], rel=1e-6)
    accuracy = last["validation_metrics"]["right"]
    assert values["accuracy"][2] == pytest.approx(accuracy, rel=1e-6)
    assert len(found["fp8"]["values"]["accuracy"]) == 3


def split_at_random(split: str, sequence_length: int) -> Any:
    order = torch.randperm(40).tolist()
    chosen = order[:8] if split == "validation" else order[8:]
    samples = [{"inputs": torch.tensor([n, 1]), "targets": torch.tensor([1, n])} for n in chosen]
    if split == "validation":
        held_out.append(sorted(chosen))
    return samples


held_out: list[list[int]] = []


def test_seeds_are_compared_on_the_same_samples() -> None:
    held_out.clear()
    size = ["--model.options={layers: 1, dimension: 32, heads: 2, vocabulary_size: 40}"]
    options = [f"--data.source={__name__}:split_at_random", "--policies=fp32", "--seeds=3"]
    seeds = compare(CalibrationConfig.load([*RUN, *size, *options]), World.current("cpu")).seeds
    assert seeds is not None
    assert len({*seeds.values["fp32"]["loss"]}) == 3
    assert all(samples == held_out[0] for samples in held_out), held_out


@pytest.mark.nightly
@ranks(2)
def test_all_policies_use_strategy_of_a_run() -> None:
    options = ["--policies", "fp32", "bf16-autocast", "--sharding.accumulate=sharded"]
    compared = compare(CalibrationConfig.load([*RUN, *options]), World.current("cpu"))
    assert [*compared.measured] == ["fp32", "bf16-autocast"], compared


@pytest.mark.parametrize(
    "strategy",
    [
        "--shard-optimizer",
        nightly("--sharding.accumulate=sharded"),
        nightly("--sharding.shard-size=8"),
    ],
)
def test_calibrated_policies_have_loss_scale_and_table(
    strategy: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Settings of many ranks are calibrated by one process, too."""
    size = ["--model.options={layers: 1, dimension: 32, heads: 2}"]
    data = f"--data.path={corpus(tmp_path / 'corpus')}"
    assert calibrate(*size, data, strategy, "--policies=bf16,fp16") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    scales, policies = captured.out.split("5 steps on 1 rank")[1:]
    assert "recommended: precision.loss_scale.init" in scales
    assert [line.split()[0] for line in policies.splitlines()[2:4]] == ["bf16", "fp16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fp32", "bf17"], "did you mean"),
        (["--policies=fp9"], "did you mean 'fp8'"),
        (["--calibrate-steps=3"], "calibrate_steps = 3: use more than 3 steps"),
        (["--tolerance=2"], "tolerance = 2.0: use a number between 0 and 1"),
        (["--calibrate-step=3"], "did you mean 'calibrate_steps'?"),
    ],
)
def test_invalid_arguments_are_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
