from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from distmp.errors import ConfigError
from distmp.optim import learning_rates as module
from distmp.optim.learning_rates import LearningRates
from tests.recording import no_waiting

CPU = torch.device("cpu")


def make_optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def halving(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def count(number: int) -> torch.Tensor:
    return torch.tensor(number)


@pytest.mark.parametrize("on_device", [True, False])
def test_every_group_follows_schedule(on_device: bool) -> None:
    optimizer = make_optimizer(0.8, 0.1)
    rates = LearningRates(optimizer, halving, CPU, on_device=on_device)
    for applied in range(4):
        first = rates.set(count(applied), applied)
        found = [float(group["lr"]) for group in optimizer.param_groups]
        assert found == pytest.approx([0.8 * 0.5**applied, 0.1 * 0.5**applied])
        assert first.item() == pytest.approx(found[0])
        kinds = {type(group["lr"]) for group in optimizer.param_groups}
        assert kinds == {torch.Tensor if on_device else float}


@settings(deadline=None, max_examples=30)
@given(skipped=st.lists(st.booleans(), max_size=20))
def test_skipped_update_does_not_advance_schedule(skipped: list[bool]) -> None:
    optimizer = make_optimizer(0.8)
    rates = LearningRates(optimizer, halving, CPU, on_device=True)
    applied = count(0)
    for steps, skip in enumerate(skipped):  # the host does not know whether one was skipped
        rates.set(applied, steps)
        expected = 0.8 * 0.5 ** applied.item()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(expected)
        applied = applied + (not skip)


def test_device_rates_keep_their_tensors() -> None:
    optimizer = make_optimizer(0.8, 0.1)
    rates = LearningRates(optimizer, halving, CPU, on_device=True)
    tensors = [group["lr"] for group in optimizer.param_groups]
    rate = rates.set(count(1), 1)
    rates.set(count(2), 2)
    assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, tensors, strict=True))
    assert rate.item() == pytest.approx(0.4)  # the rate of an earlier step does not change


def test_rates_are_constant_without_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 3)
    optimizer = make_optimizer(0.8, 0.1)
    rates = LearningRates(optimizer, None, CPU, on_device=False)
    for applied in (0, 1, 17, 4):
        assert rates.set(count(applied), applied) == 0.8
        assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.1]


@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_rate_table_grows_continuously(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    optimizer = make_optimizer(1.0)
    rates = LearningRates(optimizer, halving, CPU, on_device=False)
    found = [rates.set(count(n), n).item() for n in (0, 1, 2, 3, 9, 10, 30, 4)]
    assert found == [0.5**n for n in (0, 1, 2, 3, 9, 10, 30, 4)]


def test_resumed_run_uses_rate_of_its_update() -> None:
    optimizer = make_optimizer(1.0)
    rates = LearningRates(optimizer, halving, CPU, on_device=True)
    assert rates.set(count(12), 12).item() == 0.5**12


def test_finite_schedule_is_usable_up_to_its_end() -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10, cycle_momentum=False)

    optimizer = make_optimizer(1.0)
    reference = one_cycle(plain := make_optimizer(1.0))
    rates = LearningRates(optimizer, one_cycle, CPU, on_device=False)
    for applied in range(11):
        assert float(rates.set(count(applied), applied)) == pytest.approx(
            plain.param_groups[0]["lr"]
        )
        plain.step()
        if applied < 10:
            reference.step()


@pytest.mark.parametrize(
    "factor",
    [
        lambda step: (1 - step / 10) ** 0.9,  # complex after the end
        [1 - step / 20 for step in range(11)].__getitem__,
        {step: 1 - step / 20 for step in range(11)}.__getitem__,
        torch.linspace(1, 0.5, 11).__getitem__,
        lambda step: 1 / (11 - step),
    ],
    ids=["complex", "list", "dict", "tensor", "division"],
)
def test_only_a_rate_that_is_used_may_fail(factor: Any) -> None:
    def build(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, factor)

    reference = build(plain := make_optimizer(0.5))
    rates = LearningRates(make_optimizer(0.5), build, CPU, on_device=False)
    for applied in range(11):
        rate = rates.set(count(applied), applied)
        assert float(rate) == pytest.approx(float(plain.param_groups[0]["lr"]))
        plain.step()
        if applied < 10:
            reference.step()
    with pytest.raises(ConfigError, match="has no learning rate for update 12 "):
        rates.set(count(11), 11)


def test_schedule_that_continues_without_initial_rates_is_refused() -> None:
    def build(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.StepLR(optimizer, 2, last_epoch=5)

    with pytest.raises(ConfigError, match=r"schedule = 'build': cannot be called .*initial_lr"):
        LearningRates(make_optimizer(0.8), build, CPU, on_device=False)


@pytest.mark.parametrize("on_device", [True, False])
def test_rate_beyond_fp32_is_refused(on_device: bool) -> None:
    message = r"\[1\]\['lr'\] = 1e\+39: use .* in the range of FP32"
    with pytest.raises(ConfigError, match=message):
        LearningRates(make_optimizer(0.8, 1e39), halving, CPU, on_device=on_device)


# Rates that the user sets


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("rate", [0.3, np.float64(0.3), torch.tensor(0.3)])
def test_group_rates_apply_without_schedule(on_device: bool, rate: Any) -> None:
    optimizer = make_optimizer(0.8, 0.1)
    rates = LearningRates(optimizer, None, CPU, on_device=on_device)
    rates.set(count(0), 0)
    optimizer.param_groups[0]["lr"] = rate
    found = rates.set(count(1), 1)
    assert float(found) == pytest.approx(0.3)
    assert optimizer.param_groups[0]["lr"] is rate
    optimizer.param_groups[0]["lr"] = 0.0
    assert float(found) == pytest.approx(0.3)


@pytest.mark.parametrize("on_device", [True, False])
def test_torch_scheduler_on_optimizer_applies(on_device: bool) -> None:
    optimizer = make_optimizer(0.8)
    rates = LearningRates(optimizer, None, CPU, on_device=on_device)
    scheduler = halving(optimizer)
    found = []
    for applied in range(3):
        found.append(float(rates.set(count(applied), applied)))
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx([0.8, 0.4, 0.2])


def assign(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.5


def fill(optimizer: torch.optim.Optimizer) -> None:
    rate = optimizer.param_groups[1]["lr"]
    optimizer.param_groups[1]["lr"] = rate.fill_(0.5) if isinstance(rate, torch.Tensor) else 0.5


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("change", [assign, fill, halving])
def test_rate_changed_outside_schedule_is_refused(on_device: bool, change: Any) -> None:
    optimizer = make_optimizer(0.8, 0.1)
    rates = LearningRates(optimizer, halving, CPU, on_device=on_device)
    rates.set(count(0), 0)
    rates.set(count(1), 1)
    change(optimizer)
    if change is halving:  # like a scheduler's step
        optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] * 0.5
    with pytest.raises(ConfigError, match=r"was set outside of the schedule \(ExponentialLR\)"):
        rates.set(count(2), 2)


@pytest.mark.parametrize("on_device", [True, False])
def test_group_added_after_schedule_is_refused(on_device: bool) -> None:
    optimizer = make_optimizer(0.8, 0.1)
    rates = LearningRates(optimizer, halving, CPU, on_device=on_device)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    with pytest.raises(ConfigError, match=r"^optimizer\.param_groups = 3: .* rates for 2 groups"):
        rates.set(count(0), 0)


@pytest.mark.gpu
def test_gpu_rates_need_no_synchronization() -> None:
    gpu = torch.device("cuda")
    optimizer = make_optimizer(0.8, 0.1)
    rates = LearningRates(optimizer, halving, gpu, on_device=True)
    applied = torch.zeros((), dtype=torch.int64, device=gpu)
    found = []
    with no_waiting():
        for step in range(3 * module.FIRST_CHUNK):  # the table grows twice
            rates.set(applied, step)
            found.append(torch.stack([group["lr"] for group in optimizer.param_groups]))
            applied += 1
    for step, pair in enumerate(torch.stack(found).tolist()):
        assert pair == pytest.approx([0.8 * 0.5**step, 0.1 * 0.5**step])


def test_a_number_of_another_class_is_refused_because_states_leave_it_out() -> None:
    optimizer = make_optimizer(0.8)
    optimizer.param_groups[0]["lr"] = np.float32(0.3)
    with pytest.raises(ConfigError, match=r"'lr'\] = .*convert other numbers by float\(rate\)"):
        LearningRates(optimizer, None, CPU, on_device=False).set(torch.tensor(0), 0)
