from __future__ import annotations

import json
from pathlib import Path

import pytest

from distmp.cli import main
from distmp.commands.bench.measure import compare
from distmp.commands.bench.precision import load
from distmp.distributed.world import World
from tests.ranks import ranks

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


@ranks(2)
def test_all_policies_have_the_strategy_that_a_run_chooses() -> None:
    options = ["--policies", "fp32", "bf16-autocast", "--sharding.accumulate=sharded"]
    compared = compare(load([*RUN, *options]), World.current("cpu"))
    assert [*compared.measured] == ["fp32", "bf16-autocast"], compared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["precision", *RUN, "--policies", "fp32", "bf17"], "did you mean"),
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
