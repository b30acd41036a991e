"""What `Engine.check` logs about skipped steps and dropped microbatches."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.engine.completed_steps import SkipMessages
from distmp.engine.engine import Engine
from distmp.engine.outcome import StepNumbers, StepOutcome
from tests.ranks import ranks

GOOD, BAD = torch.ones(2, 3), torch.full((2, 3), math.nan)
EXPLAIN = "engine.explain(outcome) on every rank"


class Records(logging.Handler):
    """Keeps the messages of a logger that are about skips."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        message = record.getMessage()
        if message.startswith("step "):
            self.messages.append(message)


def logged(steps: list[list[Tensor]], *, log: bool = True, **options: Any) -> list[str]:
    """Return what `check` logs about steps on these microbatches."""
    engine = Engine(
        nn.Linear(3, 1),
        lambda module, batch: (module(batch).square().sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy="fp32",
        **options,
    )
    records, logger = Records(), logging.getLogger("distmp")
    logger.addHandler(records)
    try:
        for microbatches in steps:
            engine.check(engine.step(microbatches), log=log)
    finally:
        logger.removeHandler(records)
    return records.messages


def overflow(skips: int, **changes: float) -> StepOutcome:
    """Return the outcome of the last of `skips` steps that overflowed in a row."""
    numbers = dict.fromkeys(StepNumbers._fields, 0.0)
    numbers |= {"loss": 2.0, "weight": 4.0, "loss_scale": 2.0 ** (16 - skips), "overflow": 1.0}
    numbers |= {"skipped": 1.0, "skipped_total": skips, "skipped_in_a_row": skips, **changes}
    return StepOutcome({name: torch.tensor(value) for name, value in numbers.items()})


def test_steps_skipped_in_a_row_are_logged_once() -> None:
    first, second = logged([[GOOD], [BAD], [BAD], [GOOD], [BAD]])
    reason = "was skipped: a gradient of some rank is not finite (loss nan)"
    assert first.startswith(f"step 2 {reason}; {EXPLAIN}")
    assert second.startswith(f"step 5 {reason}")


def test_replay_is_not_recommended_without_attribution() -> None:
    (message,) = logged([[BAD]], attribution=False)
    assert message.endswith("(loss nan)")


def test_skips_are_not_logged_for_caller_that_logs_them() -> None:
    assert logged([[BAD], [BAD]], log=False) == []


def test_step_without_weight_is_logged_with_its_reason() -> None:
    (message,) = logged([[torch.ones(0, 3)]])
    assert message.startswith("step 1 was skipped: the global weight is 0")


def test_steps_with_dropped_microbatches_in_a_row_are_logged_once() -> None:
    steps = [[GOOD, BAD], [GOOD, BAD], [GOOD], [BAD, GOOD, BAD]]
    first, second = logged(steps, on_nonfinite="drop_microbatch")
    dropped = "microbatches dropped because of non-finite gradients (on_nonfinite)"
    assert first == f"step 1: {dropped}: 1; check the data of these samples"
    assert second.startswith(f"step 4: {dropped}: 2")


def test_dynamic_loss_scale_may_skip_two_steps_silently() -> None:
    messages = SkipMessages(scale_is_dynamic=True, explains=True)
    found = [messages.message(overflow(skips)) for skips in range(1, 6)]
    assert [message is not None for message in found] == [False, False, True, False, False]
    assert str(found[2]).startswith(
        "step 3 was skipped (the last of 3 in a row): a gradient of some rank is not finite "
        "(loss 2, loss scale 8192)"
    )


def test_loss_that_is_not_finite_is_logged_at_once_under_dynamic_loss_scale() -> None:
    messages = SkipMessages(scale_is_dynamic=True, explains=True)
    assert messages.message(overflow(1)) is None
    assert "(loss nan, loss scale 16384)" in str(messages.message(overflow(2, loss=math.nan)))


def test_known_cause_is_logged() -> None:
    engine = Engine(
        nn.Linear(3, 1),
        lambda module, batch: (module(batch).square().sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy="fp32",
    )
    outcome = engine.step([BAD])
    report = engine.explain(outcome)
    message = SkipMessages(scale_is_dynamic=False, explains=True).message(outcome)
    assert message == f"step 1 was skipped: {report}"
    assert str(message).endswith("on rank 0 in microbatch 0, first rows 0, 1")


@ranks(2)
def test_only_rank_0_logs_skipped_step() -> None:
    rank = dist.get_rank()
    messages = logged([[BAD if rank == 1 else GOOD]], strategy="ddp")
    assert len(messages) == (rank == 0)


@pytest.mark.parametrize("weight", [math.inf, math.nan])
@pytest.mark.parametrize("policy", ["fp32", "fp16-autocast"])
def test_weight_that_is_not_finite_is_named(
    policy: str, weight: float, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(
        nn.Linear(3, 1),
        lambda module, batch: (module(batch).square().sum(), weight),
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy=policy,
    )
    engine.check(engine.step([torch.ones(2, 3)]))
    assert f"the weights that the loss function returned add up to {weight}; return" in caplog.text
