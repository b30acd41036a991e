from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.accumulation_microbatches import SHAPES, Rank, Shape
from benchmarks.accumulation_ways import DDP_BF16, WAYS, regression
from distmp.parallel.world import World
from tests.ranks import ranks

CPU = torch.device("cpu")
COUNT, SAMPLES, WIDTH = 4, 2, 16


@pytest.mark.parametrize("count", [1, COUNT])
@ranks(2)
def test_every_way_has_the_gradient_of_the_mean(count: int) -> None:
    task = regression(WIDTH, 2, COUNT, SAMPLES, dist.get_rank(), CPU)
    exact = task.make_model().double()
    everyone = [
        regression(WIDTH, 2, COUNT, SAMPLES, rank, CPU).microbatches(count) for rank in range(2)
    ]
    for inputs, targets in (batch for batches in everyone for batch in batches):
        apart = exact(inputs.double()) - targets.double()
        (apart.square().mean() / (2 * count)).backward()
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    for way, build in WAYS.items():
        found = build(task).gradients(count)
        assert found.keys() == expected.keys(), way
        for name, gradient in expected.items():
            # What computing in bfloat16 costs; a wrong divisor would be off by a factor.
            error = (found[name].double() - gradient).norm() / gradient.norm()
            assert error < 2e-2, (way, name, error)


@ranks(2)
def test_the_error_is_that_of_accumulating_alone() -> None:
    SHAPES["cpu"] = Shape(WIDTH, 2, 64, SAMPLES)
    world = World.current("cpu")
    errors = {way: Rank(way, world).answer("error 64") for way in WAYS}
    assert errors.pop(DDP_BF16) > 1e-3
    assert max(errors.values()) < 1e-6
    # The same microbatches, and still another gradient.
    assert Rank(DDP_BF16, world).answer("error 8") < 1e-2
