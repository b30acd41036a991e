"""Spikes in the engine: their updates are skipped on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.engine.divergence_guard import DivergenceConfig
from distmp.engine.engine import Engine
from distmp.errors import TrainingError
from distmp.scaling.settings import LossScaleConfig
from tests.ranks import ranks
from tests.reference import (
    Batch,
    adamw,
    assert_same_bits,
    foreach_adamw,
    fused_adamw,
    loss,
    make_engine,
    make_model,
    microbatches,
    snapshot,
    trained,
)

SIZES = ((4, 4), (4, 4))
# Few steps give rough limits, so a spike of these tests is a hundred times as large.
SKIPPING = DivergenceConfig(on_spike="skip", warmup_steps=4)
BAD_STEPS = (6, 8)


def step(engine: Engine, number: int, factor: float = 1.0) -> Any:
    """Take a step; `factor` multiplies the loss of one microbatch, on the last rank only."""
    sizes = SIZES[: engine.world.world_size]
    batches = microbatches(number, sizes, engine.world.rank)
    if engine.world.rank == engine.world.world_size - 1:
        batches[1] = batches[1]._replace(factor=factor)
    return engine.step(batches).numbers


def bounds(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith("divergence/")}


@ranks(2)
def test_a_spike_on_one_rank_is_skipped_on_all() -> None:
    for strategy in ("ddp", "fsdp"):
        for optimizer in (fused_adamw, foreach_adamw):
            for policy in ("fp32", "fp16"):
                options: dict[str, Any] = {
                    "strategy": strategy,
                    "optimizer": optimizer,
                    "policy": policy,
                    "nominal_weight": 16.0,
                    # Low enough that a spike is finite in float16.
                    "loss_scale": LossScaleConfig(init=64.0),
                }
                guarded = make_engine(**options, divergence=SKIPPING)
                plain = make_engine(**options)
                for number in range(10):
                    bad = number in BAD_STEPS
                    numbers = step(guarded, number, 100.0 if bad else 1.0)
                    assert (numbers.spike, numbers.skipped, numbers.overflow) == (bad, bad, False)
                    assert (numbers.loss > numbers.loss_limit) == bad
                    # The same training without those steps, except for the limits.
                    if not bad:
                        step(plain, number)
                assert numbers.skipped_total == len(BAD_STEPS)
                assert_same_bits(trained(snapshot(guarded)), trained(snapshot(plain)))


@ranks(2)
def test_loaded_state_keeps_the_spike_limits() -> None:
    engine = make_engine(divergence=SKIPPING)
    for number in range(6):
        step(engine, number)
    state = snapshot(engine)
    resumed = make_engine(model=make_model(7), divergence=SKIPPING)
    resumed.load_state_dict(state)
    for number, factor in ((6, 100.0), (7, 1.0), (8, 100.0)):
        assert step(resumed, number, factor) == step(engine, number, factor)
    assert_same_bits(snapshot(resumed), snapshot(engine))
    # Runs without a spike check, before or after loading, continue too.
    unguarded = make_engine()
    unguarded.load_state_dict(state)
    assert not step(unguarded, 6, 100.0).skipped
    engine.load_state_dict(snapshot(unguarded) | bounds(snapshot(make_engine())))
    assert not step(engine, 7, 100.0).spike


def invisible_nan(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    """A non-finite loss with a finite gradient."""
    total, weight = loss(model, batch._replace(factor=1.0))
    return total + (float("nan") if batch.factor != 1 else 0.0), weight


@ranks(2)
def test_nonfinite_loss_is_skipped() -> None:
    for on_spike in ("ignore", "warn", "skip", "rollback"):
        config = DivergenceConfig(on_spike=on_spike, warmup_steps=2)  # type: ignore[arg-type]
        engine = Engine(
            make_model(), invisible_nan, adamw, policy="fp32", device="cpu", divergence=config
        )
        for number in range(4):
            step(engine, number)
        before = snapshot(engine)
        numbers = step(engine, 4, 2.0)
        assert numbers.loss != numbers.loss
        assert (numbers.overflow, numbers.spike) == (False, False)
        assert numbers.skipped == (on_spike != "rollback")
        after = snapshot(engine)
        assert_same_bits(bounds(after), bounds(before))
        if numbers.skipped:
            assert_same_bits(trained(after), trained(before))
        else:
            assert not torch.equal(after["model/head.weight"], before["model/head.weight"])


def test_consecutive_skipped_spikes_end_the_run() -> None:
    engine = make_engine(divergence=SKIPPING, max_consecutive_skips=3)
    for number in range(6):
        step(engine, number)
    for number in (6, 7):
        engine.step(microbatches(number, SIZES[:1]))
    for number in (8, 9, 10):
        outcome = engine.step(
            [batch._replace(factor=100.0) for batch in microbatches(number, SIZES[:1])]
        )
        if number < 10:
            engine.check(outcome)
    with pytest.raises(TrainingError) as caught:
        engine.check(outcome)
    message = str(caught.value)
    assert message.startswith("max_consecutive_skips = 3: that many steps in a row")
    assert "were skipped as spikes" in message
    assert "lower the learning rate, or raise the threshold of divergence" in message
    # Names of the trainer's settings mean nothing in a custom training loop.
    assert "optim.lr" not in message


@pytest.mark.parametrize("checked", [False, True])
def test_spike_is_reported_in_custom_loop(checked: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(divergence=DivergenceConfig(on_spike="warn", warmup_steps=4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(8):
            factor = 100.0 if number == 6 else 1.0
            batches = [batch._replace(factor=factor) for batch in microbatches(number, SIZES[:1])]
            outcome = engine.step(batches)
            if checked:
                engine.check(outcome)
    messages = [*caplog.messages, *(str(warning.message) for warning in caught)]
    (message,) = [text for text in messages if "is above its limit of" in text]
    assert message.startswith("step 7: ")
