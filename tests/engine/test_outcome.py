from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from distmp.engine.outcome import StepNumbers, StepOutcome, advice


def tensors() -> dict[str, Tensor]:
    return {
        "loss": torch.tensor(1.25, dtype=torch.float64),
        "weight": torch.tensor(2.0**40 + 1, dtype=torch.float64),
        "grad_norm": torch.tensor(float("inf"), dtype=torch.float64),
        "learning_rate": torch.tensor(0.5),
        "loss_scale": torch.tensor(65536.0),
        "overflow": torch.tensor(True),
        "dropped": torch.tensor(2.0, dtype=torch.float64),
        "skipped": torch.tensor(1),
        "spike": torch.tensor(True),
        "loss_limit": torch.tensor(1.5, dtype=torch.float64),
        "norm_limit": torch.tensor(float("inf"), dtype=torch.float64),
        "stop": torch.tensor(False),
        "applied_total": torch.tensor(10**9),
        "skipped_total": torch.tensor(3),
        "skipped_in_a_row": torch.tensor(2),
        "scale_exhausted": torch.tensor(True),
    }


def test_numbers_have_their_types_and_values() -> None:
    numbers = StepOutcome(tensors()).numbers
    assert numbers == StepNumbers(
        loss=1.25,
        weight=2.0**40 + 1,
        grad_norm=float("inf"),
        learning_rate=0.5,
        loss_scale=65536.0,
        overflow=True,
        dropped=2,
        skipped=True,
        spike=True,
        loss_limit=1.5,
        norm_limit=float("inf"),
        stop=False,
        applied_total=10**9,
        skipped_total=3,
        skipped_in_a_row=2,
        scale_exhausted=True,
    )
    kinds = [type(value) for value in numbers]
    assert kinds == [float] * 5 + [bool, int] + [bool] * 2 + [float] * 2 + [bool] + [int] * 3 + [
        bool
    ]


def test_numbers_are_those_of_the_step_though_its_tensors_change_later() -> None:
    live = tensors()
    outcome = StepOutcome(live)
    live["loss"].fill_(9)
    live["applied_total"].add_(1)
    assert (outcome.numbers.loss, outcome.numbers.applied_total) == (1.25, 10**9)
    assert outcome.numbers is outcome.numbers


@pytest.mark.gpu
def test_making_an_outcome_does_not_wait_for_the_device() -> None:
    on_device = {name: value.cuda() for name, value in tensors().items()}
    # Kernels are loaded when they are first used, and that waits for the device.
    assert StepOutcome(on_device).numbers == StepOutcome(tensors()).numbers
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second or more
    done = torch.cuda.Event()
    outcome = StepOutcome(on_device)
    done.record()
    assert not done.query()
    assert outcome.numbers == StepOutcome(tensors()).numbers


def test_an_outcome_can_be_copied() -> None:
    outcome = StepOutcome(tensors())
    assert copy.copy(outcome).numbers.loss == 1.25
    outcome.numbers  # noqa: B018  # waits for the copy
    assert pickle.loads(pickle.dumps(outcome.numbers)) == outcome.numbers


@pytest.mark.parametrize(
    ("scale", "exhausted", "remedy"),
    [
        (65536.0, False, "a lower min_scale"),
        (1.0, True, "a lower min_scale"),
        (1.0, False, "batch"),
    ],
)
def test_advice_names_loss_scale_only_where_there_is_one(
    scale: float, exhausted: bool, remedy: str
) -> None:
    numbers = StepOutcome(tensors()).numbers._replace(
        weight=1.0, spike=False, loss=float("nan"), loss_scale=scale, scale_exhausted=exhausted
    )
    assert remedy in advice(numbers)
    assert ("min_scale" in advice(numbers)) == ("min_scale" in remedy)
