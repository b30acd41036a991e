"""Weights of a loss function that are infinite, NaN or negative."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.engine.engine import Engine
from distmp.scaling.settings import LossScaleConfig
from tests.parallel.sharding import sharded
from tests.ranks import ranks, same_on_all_ranks
from tests.reference import (
    TWO_RANKS,
    Batch,
    assert_same_bits,
    fused_adamw,
    loss,
    make_model,
    microbatches,
    snapshot,
    train,
    trained,
    weights,
)

# With the last one, weights still add up to a positive number.
BAD = (math.inf, -math.inf, math.nan, -1.0)
SCALE = 2.0**8


def weighed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the usual loss; a `factor` other than 1 replaces the weight."""
    total, weight = loss(model, batch._replace(factor=1.0))
    # A tensor: its sign is not checked after the first step.
    return total, torch.tensor(weight if batch.factor == 1 else batch.factor)


def make_engine(**options: Any) -> Engine:
    rules = LossScaleConfig(init=SCALE)
    options = {"policy": "fp16", "loss_scale": rules, "device": "cpu", **options}
    options["first_step_checks"] = False
    return Engine(make_model(), weighed, fused_adamw, **options)


def made_non_finite(
    engine: Engine, step: int, bad: float, *, rank: int, index: int = 0
) -> list[Batch]:
    batches = microbatches(step, TWO_RANKS[step], engine.world.rank)
    if engine.world.rank == rank:
        batches[index] = batches[index]._replace(factor=bad)
    return batches


@pytest.mark.parametrize("bad", BAD)
def test_a_first_weight_that_cannot_be_used_is_an_overflow(bad: float) -> None:
    engine = make_engine()
    before = weights(engine)
    outcome = engine.step(made_non_finite(engine, 0, bad, rank=0))
    numbers = outcome.numbers
    assert (numbers.overflow, numbers.skipped, numbers.loss_scale) == (True, True, SCALE)
    assert engine.loss_scale.value == SCALE / 2
    assert_same_bits(weights(engine), before)
    report = engine.explain(outcome)
    assert report is not None
    assert report.cause == "bad_weight"
    assert "return the number of samples or tokens" in report.advice
    # The constant is that of the first step with a weight that can be used.
    assert engine.nominal_weight is None
    assert not train(engine, 1, TWO_RANKS, first=1)[0].skipped
    assert engine.nominal_weight == 16


@pytest.mark.nightly
@ranks(2)
def test_a_weight_of_one_rank_that_cannot_be_used_is_skipped_by_all() -> None:
    for options in (
        {"strategy": "ddp"},
        {"strategy": "ddp", "on_nonfinite": "drop_microbatch"},
        {"strategy": "ddp", "reproducible": True, "policy": "fp32"},
        sharded("fsdp"),
    ):
        has_scale = options.get("policy") != "fp32"
        for bad in BAD:
            for index in range(2):
                engine, twin = make_engine(**options), make_engine(**options)
                outcome = engine.step(made_non_finite(engine, 0, bad, rank=1, index=index))
                assert (outcome.numbers.overflow, outcome.numbers.skipped) == (True, True)
                assert engine.loss_scale.value == (SCALE / 2 if has_scale else 1)
                report = engine.explain(outcome)
                assert report is not None
                assert report.cause == "bad_weight"
                numbers = train(engine, 1, TWO_RANKS, first=2)
                assert not numbers[0].skipped
                assert same_on_all_ranks((engine.nominal_weight, numbers))
                # Neither n0 nor the scale changes the bits of a step without overflow.
                train(twin, 1, TWO_RANKS, first=2)
                assert_same_bits(trained(snapshot(engine)), trained(snapshot(twin)))
    torch.use_deterministic_algorithms(False)
