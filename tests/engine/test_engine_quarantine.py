"""`on_nonfinite: drop_microbatch`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.engine.engine import Engine
from distmp.errors import ConfigError
from distmp.parallel import ParallelConfig
from distmp.scaling.settings import LossScaleConfig
from tests.ranks import ranks
from tests.recording import HostReads
from tests.reference import (
    INPUTS,
    Batch,
    Classifier,
    assert_same_bits,
    fused_adamw,
    loss,
    make_engine,
    make_model,
    microbatches,
    snapshot,
    weights,
)

SIZES = ((3, 5), (1, 7))
INF = float("inf")


def quarantine(**options: Any) -> Engine:
    return make_engine(on_nonfinite="drop_microbatch", max_norm=1.3, **options)


def step_of(engine: Engine, step: int, bad: set[tuple[int, int]], value: float = INF) -> Any:
    """Take a step in which some (rank, microbatch) have non-finite gradients."""
    rank = engine.world.rank
    return engine.step(
        [
            batch._replace(factor=value) if (rank, index) in bad else batch
            for index, batch in enumerate(microbatches(step, SIZES, rank))
        ]
    ).numbers


@ranks(2)
def test_gradient_is_the_mean_over_kept_microbatches() -> None:
    for options in (
        {"policy": "fp32"},
        {"policy": "bf16"},
        {"policy": "fp32", "shard_optimizer": True},
        {"policy": "fp32", "reproducible": True},
    ):
        engine = quarantine(strategy="ddp", **options)
        # The same step with empty microbatches in their place.
        reference = make_engine(strategy="ddp", max_norm=1.3, **options)
        for step, bad in enumerate([set(), {(0, 0)}, {(1, 1)}, {(0, 1), (1, 1)}, {(1, 0), (1, 1)}]):
            value = [INF, float("nan"), -INF][step % 3]
            numbers = step_of(engine, step, bad, value)
            rank = dist.get_rank()
            batches = [
                Batch(batch.inputs[:0], batch.labels[:0]) if (rank, index) in bad else batch
                for index, batch in enumerate(microbatches(step, SIZES, rank))
            ]
            expected = reference.step(batches).numbers
            assert numbers.dropped == len(bad)
            assert numbers == expected._replace(dropped=len(bad))
        for name, value in weights(reference).items():
            torch.testing.assert_close(weights(engine)[name], value, rtol=1e-6, atol=1e-7)
    torch.use_deterministic_algorithms(False)


@ranks(2)
def test_step_with_all_microbatches_dropped_is_an_overflow() -> None:
    engine = quarantine(strategy="ddp")
    before = snapshot(engine)
    numbers = step_of(engine, 0, {(0, 0), (0, 1), (1, 0), (1, 1)})
    assert (numbers.dropped, numbers.overflow, numbers.skipped) == (4, True, True)
    after = snapshot(engine)
    for name in before:
        if name.startswith("model/"):
            assert torch.equal(after[name], before[name])
    assert engine.explain is not None
    assert not step_of(engine, 1, set()).skipped


def test_a_dropped_microbatch_lowers_the_scale_as_any_overflow_does() -> None:
    config = LossScaleConfig(init=2.0**10, growth_interval=3)
    engine = quarantine(policy="fp16", loss_scale=config)
    scales = []
    for step, bad in enumerate([set(), {(0, 0)}, set(), set(), set()]):
        numbers = step_of(engine, step, bad)
        assert not numbers.skipped
        scales.append(numbers.loss_scale)
    assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**9]
    assert engine.loss_scale.value == 2.0**10


def test_at_the_lowest_scale_training_continues_with_the_other_microbatches() -> None:
    config = LossScaleConfig(init=1.0, min_scale=1.0)
    engine = quarantine(policy="fp16", loss_scale=config)
    for step in range(3):
        outcome = engine.step(
            [microbatches(step, SIZES)[0], microbatches(step, SIZES)[1]._replace(factor=INF)]
        )
        engine.check(outcome)
        assert outcome.numbers.dropped == 1
        assert not outcome.numbers.skipped


def test_steps_without_drops_equal_default_mode() -> None:
    engine, reference = quarantine(), make_engine(max_norm=1.3)
    for step in range(5):
        assert step_of(engine, step, set()) == step_of(reference, step, set())
    assert_same_bits(snapshot(engine), snapshot(reference))


class Normalised(Classifier):
    """Has an integer buffer and a buffer of its inputs, which a bad microbatch makes non-finite."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(INPUTS)
        self.register_buffer("largest", torch.zeros(INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().amax(0))
        return super().forward(self.norm(x))


def normalised() -> Normalised:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Normalised()


@ranks(2)
def test_buffers_go_back_to_before_a_microbatch_that_is_dropped() -> None:
    rank = dist.get_rank()
    for options in (
        {"strategy": "ddp"},
        {"strategy": "ddp", "reproducible": True},
        {"strategy": "ddp", "shard_optimizer": True},
    ):
        model, plain = normalised(), normalised()
        engine = make_engine(model=model, on_nonfinite="drop_microbatch", policy="fp32", **options)
        for step in range(4):
            bad = {(0, step % 2), (1, step // 2)}
            batches = microbatches(step, ((3, 5), (2, 4)), rank)
            for index, batch in enumerate(batches):
                if (rank, index) in bad:
                    batch.inputs[0, 0] = [INF, float("nan")][step % 2]
            assert engine.step(batches).numbers.dropped == 2
            # As always, the buffers are those of rank 0; of its first microbatch if reproducible.
            counted = 1 if "reproducible" in options else 2
            for index, batch in enumerate(microbatches(step, ((3, 5), (2, 4)), 0)[:counted]):
                if (0, index) not in bad:
                    plain(batch.inputs)
            assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
        assert model.norm.num_batches_tracked == 2 * counted
        assert math.isfinite(engine.evaluate(microbatches(9, ((3, 5), (2, 4)), rank)))
    torch.use_deterministic_algorithms(False)


def test_reverting_buffers_needs_no_synchronization() -> None:
    parallel = ParallelConfig(activation_checkpointing="blocks")
    engine = quarantine(model=normalised(), policy="fp32", parallel=parallel)
    for step in range(2):
        step_of(engine, step, set())
    batches = microbatches(2, SIZES[:1])
    batches[0].inputs[0, 0] = INF
    with HostReads() as reads:
        outcome = engine.step(batches)
    assert reads.found == []
    assert outcome.numbers.dropped == 1


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"on_nonfinite = 'drop'.*drop_microbatch"):
        Engine(make_model(), loss, fused_adamw, on_nonfinite="drop", device="cpu")
