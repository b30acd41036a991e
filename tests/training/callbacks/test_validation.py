"""What a run prints about its validations, with the real trainer on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distmp.config import load
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.telemetry.console import Console
from distmp.training.callbacks.validation import loss_unit, weight_unit
from distmp.training.trainer import Trainer
from tests.ranks import ranks
from tests.training.test_resume import configuration


def printed(directory: Path, **values: Any) -> list[str]:
    """Train, and return the lines about held-out data."""
    config = configuration(directory, steps=3, **values)
    world = World.current("cpu")
    run = Trainer(config, world, Console(config.log, quiet=world.rank != 0))
    lines: list[str] = []
    run.console.message = lines.append  # type: ignore[method-assign]
    assert run.run(StopSignals())
    return [line for line in lines if line.startswith(("validat", "held-out"))]


@ranks(2)
def test_the_final_validation_is_announced_and_others_are_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 1, "samples": 4, "final_samples": 6}
    lines = printed(tmp_path / "some", validation=options)
    assert [line.split(" loss")[0] for line in lines] == [
        "validating on the held-out samples",
        "held-out",
    ]


# The unit of the weight that losses and throughputs are reported with.


OWN = "--model.loss=my_model:loss"
TOKENS = ["--data.source=tokens", "--data.path=tokens.bin"]


@pytest.mark.parametrize(
    ("arguments", "weight", "unit", "of_loss"),
    [
        ([], 4096, "token", " nats per byte"),
        (TOKENS, 4096, "token", " nats per token"),
        ([OWN], 32, "sample", ""),
        ([OWN], 30, "sample", ""),  # two samples are masked
        ([OWN], 4096, "unit", ""),
    ],
)
def test_the_unit_follows_the_loss(
    arguments: list[str], weight: int, unit: str, of_loss: str
) -> None:
    config = load(["--batch.global-batch-size=32", *arguments])
    assert weight_unit(config, weight) == unit
    assert loss_unit(config) == of_loss
