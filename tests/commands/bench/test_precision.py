from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from distmp.cli import main
from distmp.commands.bench.comparison import PolicyResult
from distmp.commands.bench.measure import compare, measure
from distmp.commands.bench.precision import load
from distmp.distributed.world import World
from tests.ranks import ranks
from tests.torchrun import corpus

RUN = (
    "--model.size=1m",
    "--data.sequence-length=16",
    "--batch.global-batch-size=4",
    "--batch.microbatch-size=2",
    "--optim.lr=1e-3",
    "--schedule.warmup-steps=0",
    "--bench-steps=5",
    "--picture=null",
)


def bench(*arguments: str) -> int:
    return main(["bench", "precision", *RUN, *arguments])


def test_policies_are_compared_on_the_same_steps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench("--policies", "fp32", "tf32", "bf16-autocast", "--json", "true") == 0
    found = json.loads(capsys.readouterr().out)
    # TF32 has no effect on a CPU: identical losses, from the same weights and batches.
    policies = found["policies"]
    assert policies["fp32"]["losses"] == policies["tf32"]["losses"]
    assert policies["fp32"]["losses"] != policies["bf16-autocast"]["losses"]
    for one in policies.values():
        assert one["losses"][0] == pytest.approx(policies["fp32"]["losses"][0], rel=1e-2)
        assert one["memory_bytes"] > 4 * 1_000_000 * 3
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_the_noise_is_that_of_other_seeds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size = ["--model.layers=1", "--model.dimension=32", "--model.heads=2", "--validation.samples=4"]
    data = [f"--data.path={corpus(tmp_path / 'corpus')}", "--data.held-out=0.3"]
    # They change the formats of the narrow policy only.
    changing = ["--precision.phases", "{after_steps: 3, forward: bf16}", "--precision.policy=fp8"]
    data += [*changing, "--precision.guard.saturated=0.1"]
    options = [*size, *data, "--policies", "bf16,fp8", "--seeds=2", "--json", "true"]
    assert bench(*options) == 0
    found = json.loads(capsys.readouterr().out)
    losses = [found["policies"]["bf16"]["final_loss"], *found["noise"]["final_losses"]]
    assert len({*losses}) == 3
    assert found["noise"]["standard_deviation"] == pytest.approx(statistics.stdev(losses))
    # Each is the loss of a run with another seed, on the same held-out samples.
    config = load([*RUN, *options])
    for index, loss in enumerate(losses):
        seeded = dataclasses.replace(config, seed=config.seed + index)
        again = measure(seeded, World.current("cpu"), "bf16", steps=config.bench_steps)
        assert isinstance(again, PolicyResult)
        assert again.held_out == pytest.approx(loss, rel=1e-6)


@ranks(2)
def test_all_policies_have_the_strategy_that_a_run_chooses() -> None:
    options = ["--policies", "fp32", "bf16-autocast", "--sharding.accumulate=sharded"]
    compared = compare(load([*RUN, *options]), World.current("cpu"))
    assert [*compared.measured] == ["fp32", "bf16-autocast"], compared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["precision", *RUN, "--policies", "fp32", "bf17"], "did you mean"),
        (["precision", *RUN, "--seeds=1"], "seeds = 1: use 2 or more other seeds"),
        (["precision", *RUN, "--bench-steps=3"], "use more than 3 steps"),
        (["precison"], "did you mean 'precision'"),
    ],
)
def test_invalid_arguments_are_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
