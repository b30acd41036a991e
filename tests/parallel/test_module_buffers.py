from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distmp.engine import Engine
from distmp.parallel.module_buffers import ModuleBuffers
from tests.ranks import ranks
from tests.reference import (
    CLASSES,
    INPUTS,
    Batch,
    assert_same_bits,
    fused_adamw,
    loss,
    sgd,
    weights,
)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
        )
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def batch(step: int, rank: int, factor: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(6, INPUTS, generator=generator) * (1 + rank)
    return Batch(inputs, torch.randint(CLASSES, (6,), generator=generator), factor)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


@ranks(2)
def test_batch_statistics_are_those_of_ddp() -> None:
    rank = dist.get_rank()
    for strategy in ("ddp", "fsdp"):
        model = Normalised()
        ddp = DistributedDataParallel(copy.deepcopy(model))
        optimizer = sgd(ddp.parameters())
        engine = Engine(model, loss, sgd, policy="fp32", strategy=strategy, device="cpu")
        for step in range(4):
            optimizer.zero_grad()
            total, weight = loss(ddp, batch(step, rank))
            (total / weight).backward()
            optimizer.step()
            engine.step([batch(step, rank)])
        if rank == 0:  # the others get theirs at DDP's next forward
            for name, value in statistics(ddp.module).items():
                torch.testing.assert_close(dict(model.named_buffers())[name], value)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, statistics(model))
        assert_same_bits(everyone[0], everyone[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_skipped_step_leaves_no_trace(value: float) -> None:
    model = Normalised()
    engine = Engine(model, loss, fused_adamw, policy="fp32", device="cpu")
    engine.step([batch(0, 0)])
    before = statistics(model)
    bad = batch(1, 0)
    bad.inputs[0, 0] = value
    assert engine.step([batch(2, 0), bad]).numbers.skipped
    assert_same_bits(statistics(model), before)
    assert not engine.step([batch(3, 0)]).numbers.skipped
    assert statistics(model)["layers.1.num_batches_tracked"] == 2


def test_a_step_that_raised_leaves_no_trace() -> None:
    model = Normalised()
    engine = Engine(model, loss, fused_adamw, policy="fp32", device="cpu")
    twin_model = Normalised()
    twin = Engine(twin_model, loss, fused_adamw, policy="fp32", device="cpu")
    for one in (engine, twin):
        one.step([batch(0, 0)])
    with pytest.raises(AttributeError):
        engine.step([batch(1, 0), None])
    for one in (engine, twin):
        one.step([batch(2, 0)])
    assert_same_bits(statistics(model), statistics(twin_model))
    assert_same_bits(weights(engine), weights(twin))


def test_buffers_that_are_replaced_or_come_later() -> None:
    model = Normalised()
    buffers = ModuleBuffers(model, None)
    buffers.begin_step()
    model.mask = torch.zeros(8, dtype=torch.bool)
    model.register_buffer("new", torch.ones(3))
    buffers.end_step(torch.tensor(1.0))
    assert model.mask.all()
    assert model.new.tolist() == [1, 1, 1]
