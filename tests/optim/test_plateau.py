"""Schedules that follow a metric: the rates are torch's, and continue from a state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

from distmp.errors import ConfigError
from distmp.optim import LearningRates
from tests.optim.test_learning_rates import CPU, count, make_optimizer
from tests.ranks import ranks
from tests.reference import TWO_RANKS, make_engine, make_model, snapshot, train

METRICS = st.one_of(st.floats(-2, 2), st.just(math.nan), st.just(math.inf))
OPTIONS = st.fixed_dictionaries(
    {
        "patience": st.integers(0, 2),
        "cooldown": st.integers(0, 2),
        "factor": st.sampled_from([0.5, 0.1]),
        "mode": st.sampled_from(["min", "max"]),
        "min_lr": st.sampled_from([0.0, 0.05, [0.3, 0.0]]),
    }
)


@settings(deadline=None, max_examples=40)
@given(
    options=OPTIONS,
    steps=st.lists(st.one_of(METRICS, st.sampled_from(["update", "load"])), max_size=15),
    on_device=st.booleans(),
)
def test_the_rates_are_torchs_at_any_moment(
    options: dict[str, Any], steps: list[Any], on_device: bool
) -> None:
    reference = make_optimizer(0.8, 0.1)
    torchs = ReduceLROnPlateau(reference, **options)

    def build() -> tuple[torch.optim.Optimizer, LearningRates]:
        optimizer = make_optimizer(0.8, 0.1)

        def schedule(placeholder: torch.optim.Optimizer) -> ReduceLROnPlateau:
            return ReduceLROnPlateau(placeholder, **options)

        return optimizer, LearningRates(optimizer, schedule, CPU, on_device=on_device)

    optimizer, rates = build()
    for updates, step in enumerate(steps):
        if step == "load":
            state = rates.state_dict()
            optimizer, rates = build()
            rates.load_state_dict(state)
        elif step != "update":
            torchs.step(step)
            assert rates.follow(step) == reference.param_groups[0]["lr"]
        rates.set(count(updates), updates + 3)  # three were skipped, as far as the host knows
        found = [float(group["lr"]) for group in optimizer.param_groups]
        expected = [group["lr"] for group in reference.param_groups]
        assert found == pytest.approx(expected, rel=1e-6 if on_device else 0)
        assert rates.planned(updates) == expected


def test_groups_that_are_added_get_the_reductions_so_far() -> None:
    optimizer = make_optimizer(0.8)
    rates = LearningRates(
        optimizer, lambda o: ReduceLROnPlateau(o, patience=1), CPU, on_device=False
    )
    for metric in (1.0, 2.0, 2.0, 2.0):
        rates.follow(metric)
    added = make_optimizer(0.1).param_groups
    rates.add_groups(added)
    optimizer.add_param_group(added[0])
    rates.set(count(0), 0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.08, 0.01])
    rates.follow(2.0)  # the second bad one in a row: the count was not lost
    rates.set(count(0), 0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.008, 0.001])


# In the engine

KINDS: dict[str, dict[str, Any]] = {
    "ddp, fp16": {"strategy": "ddp", "policy": "fp16"},
    "sharded optimizer": {"strategy": "ddp", "policy": "bf16", "shard_optimizer": True},
}


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@ranks(2, timeout=120)
def test_the_engine_trains_with_the_rates_and_continues_from_a_checkpoint(tmp_path: Any) -> None:
    for number, options in enumerate(KINDS.values()):
        # One engine follows the metric, the other has its rates set, by a scheduler of the user.
        engine, plain = make_engine(schedule=plateau, **options), make_engine(**options)
        own = plateau(plain.optimizer)
        for step, metric in enumerate((1.0, 2.0, torch.tensor(0.5), math.nan)):
            numbers = [train(one, 1, TWO_RANKS, first=step)[0] for one in (engine, plain)]
            assert numbers[0].learning_rate == numbers[1].learning_rate
            assert engine.schedule_step(metric) == (0.01, 0.005, 0.005, 0.0025)[step]
            own.step(float(metric))
        rates = snapshot(plain)["schedule/rates"]
        assert set(rates.tolist()) == {0.0025}
        plain.save(tmp_path / f"{number}-plain", {"scheduler": own.state_dict()})
        engine.save(tmp_path / f"{number}-schedule")
        again, plain_again = make_engine(schedule=plateau, **options), make_engine(**options)
        own_again = plateau(plain_again.optimizer)
        again.load(tmp_path / f"{number}-schedule")
        own_again.load_state_dict(plain_again.load(tmp_path / f"{number}-plain")["scheduler"])
        assert own_again.best == 0.5
        for one in (engine, plain, again, plain_again):
            outcome = train(one, 1, TWO_RANKS)[0]
            assert outcome.learning_rate == pytest.approx(0.0025)
        for one in (engine, again):
            assert one.schedule_step(0.49) == 0.0025, "an improvement"
            assert one.schedule_step(0.6) == 0.00125


@ranks(2)
def test_all_ranks_take_the_same_decision() -> None:
    engine = make_engine(strategy="ddp", schedule=plateau)
    rank = engine.world.rank
    with pytest.raises(ConfigError, match=r"metric = 0.0 on rank 0; 1.0 on rank 1: differs betwe"):
        engine.schedule_step(float(rank))
    for metric in ("1", torch.ones(2), None):
        with pytest.raises(ConfigError, match=r"is not one number; pass loss.item\(\)"):
            engine.schedule_step(metric)  # type: ignore[arg-type]
    plain = make_engine(strategy="ddp")
    with pytest.raises(ConfigError, match=r"schedule = 'NoneType': does not follow a metric"):
        plain.schedule_step(1.0)
    own = plateau(plain.optimizer)
    for metric in (1.0, 0.5 + rank):  # improves on rank 0 only
        own.step(metric)
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['lr'\] = 0.0\d+ on rank 0; 0.0"):
        train(plain, 1, TWO_RANKS)


def in_two_groups(named: Any) -> torch.optim.Optimizer:
    tensors = [tensor for _, tensor in named]
    groups = [{"params": tensors[1:], "lr": 0.3}, {"params": tensors[:1], "lr": 0.2}]
    return torch.optim.SGD(groups)


def test_states_for_other_groups_leave_the_rates(caplog: pytest.LogCaptureFixture) -> None:
    one = make_engine()
    two = make_engine(optimizer=in_two_groups)
    one.load_state_dict(two.state_dict())
    assert one.optimizer.param_groups[0]["lr"] == 0.01
    assert any("parameter groups 0 of this engine have param" in text for text in caplog.messages)
    caplog.clear()
    two.load_state_dict(make_engine().state_dict())
    assert [group["lr"] for group in two.optimizer.param_groups] == [0.01, 0.01]
    assert caplog.messages == []
    other = make_engine(schedule=plateau)
    other.load_state_dict(one.state_dict())
    assert any("the state has no schedule/plateau for" in text for text in caplog.messages)
    caplog.clear()
    frozen = make_model()
    frozen.first.requires_grad_(False)
    make_engine(model=frozen).load_state_dict(one.state_dict())
    assert any("the state has no schedule/rates for the tra" in text for text in caplog.messages)
