"""The unit of the weight that losses and throughputs are reported with."""

from __future__ import annotations

import pytest

from distmp.config import load
from distmp.training.callbacks.validation import loss_unit, weight_unit

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
