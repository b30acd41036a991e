"""What a run prints about its validations, with the real trainer on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distmp.config import load
from distmp.distributed.stopping import StopSignals
from distmp.training.callbacks.validation import loss_unit, weight_unit
from tests.ranks import ranks
from tests.toys import printed, trainer_of
from tests.training.test_resume import configuration


@ranks(2)
def test_only_final_validation_is_announced(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 1, "samples": 4, "final_samples": 6}
    run = trainer_of(configuration(tmp_path / "some", steps=3, validation=options))
    lines = printed(run, "validat", "held-out")
    assert [line.split(" loss")[0] for line in lines] == [
        "validating on the held-out samples",
        "held-out",
    ]


def fails(output: Any, batch: Any) -> Any:
    raise ValueError("a metric of somebody")


def test_metric_that_fails_does_so_before_training(tmp_path: Path) -> None:
    metrics = {"metrics": {"own": f"{__name__}:fails"}}
    run = trainer_of(configuration(tmp_path / "some", steps=3, validation=metrics))
    with pytest.raises(ValueError, match="a metric of somebody"):
        run.run(StopSignals())
    assert run.progress.step == 0


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
def test_units_follow_loss_function(
    arguments: list[str], weight: int, unit: str, of_loss: str
) -> None:
    config = load(["--batch.global-batch-size=32", *arguments])
    assert weight_unit(config, weight) == unit
    assert loss_unit(config) == of_loss
