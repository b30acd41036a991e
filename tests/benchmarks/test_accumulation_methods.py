from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from benchmarks.accumulation_methods import DDP_BF16, METHODS, regression
from benchmarks.accumulation_microbatches import SHAPES, Rank, Shape
from distmp.distributed.world import World
from distmp.scaling.norms import CHUNK
from tests.ranks import in_turn, ranks

CPU = torch.device("cpu")
COUNT, SAMPLES, WIDTH = 4, 2, 16


@ranks(2)
@in_turn("count", [1, COUNT])
def test_every_way_has_the_gradient_of_the_mean(count: int) -> None:
    task = regression(WIDTH, 2, COUNT, SAMPLES, dist.get_rank(), CPU)
    exact = task.make_model().double()
    by_rank = [
        regression(WIDTH, 2, COUNT, SAMPLES, rank, CPU).microbatches(count) for rank in range(2)
    ]
    for inputs, targets in (batch for batches in by_rank for batch in batches):
        residual = exact(inputs.double()) - targets.double()
        (residual.square().mean() / (2 * count)).backward()
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    for method, build in METHODS.items():
        found = build(task).gradients(count)
        assert found.keys() == expected.keys(), method
        for name, gradient in expected.items():
            # The rounding error of bfloat16; a wrong divisor would be off by a factor.
            error = (found[name].double() - gradient).norm() / gradient.norm()
            assert error < 2e-2, (method, name, error)


@pytest.mark.nightly
@ranks(2)
def test_the_error_is_that_of_accumulating_alone() -> None:
    SHAPES["cpu"] = Shape(WIDTH, 2, 64, SAMPLES)
    world = World.current("cpu")
    errors = {method: Rank(method, world).answer("error 64") for method in METHODS}
    assert errors.pop(DDP_BF16) > 1e-3
    assert max(errors.values()) < 1e-6


@pytest.mark.nightly
@ranks(2)
def test_memory_grows_with_the_microbatches_only_with_partial_sums() -> None:
    SHAPES["cpu"] = Shape(128, 2, 64, SAMPLES)
    world = World.current("cpu")
    parameters = 2 * (128 * 128 + 128)
    padded = math.ceil(parameters / (2 * CHUNK)) * 2 * CHUNK
    for method in METHODS:
        few, many = (Rank(method, world).answer(f"peak {count}") for count in (8, 64))
        # Each doubling adds a set of FP32 buckets, padded to chunks for each rank.
        expected = 3 * 4 * padded / parameters if "reproducible" in method else 0
        # Buffers of collectives vary with the timing of ranks, especially with FSDP2; an additional
        # set of gradients would be 4, and one per microbatch 200.
        assert many - few == pytest.approx(expected, abs=2), method
        assert few > 4
