"""Microbatches of a step that are drawn from an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.engine.engine import Engine
from distmp.errors import ConfigError


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


def make(**options: Any) -> Engine:
    torch.manual_seed(0)
    options = {"policy": "fp32", "first_step_checks": False} | options
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return Engine(model, loss, lambda named: torch.optim.SGD(named, lr=0.1), **options)


def batches(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2 + i % 3, 3, generator=generator) for i in range(count)]


def weights(engine: Engine) -> list[Tensor]:
    return [value.clone() for value in engine.state_dict().values()]


class Sized:
    def __init__(self, items: list[Tensor]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.items)


@pytest.mark.parametrize("options", [{}, {"reproducible": True}, {"first_step_checks": True}])
def test_iterators_train_like_lists(options: dict[str, Any]) -> None:
    listed, drawn = make(**options), make(**options)
    for step in range(3):
        items = batches(4, step)
        torch.manual_seed(step)
        expected = listed.step(items).numbers
        torch.manual_seed(step)
        if step == 1:
            numbers = drawn.step(Sized(items)).numbers
        else:
            numbers = drawn.step((item for item in items), count=4).numbers
        assert numbers == expected
    assert all(map(torch.equal, weights(listed), weights(drawn)))
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("given", "count", "message"),
    [
        (lambda: iter(batches(2)), 3, "count = 3: there are 2 microbatches; iterate"),
        (lambda: iter(batches(4)), 3, "count = 3: there are more microbatches"),
        (lambda: iter(()), 3, "count = 3: there are 0 microbatches"),
        (lambda: batches(2), 3, "count = 3: there are 2 microbatches"),
        (list, None, "is empty; a step needs at least one microbatch"),
    ],
)
def test_an_iterator_that_ends_early_or_goes_on_is_refused(
    given: Any, count: Any, message: str
) -> None:
    engine = make()
    engine.step(batches(2))
    before = weights(engine)
    with pytest.raises(ConfigError, match=message):
        engine.step(given(), count=count)
    assert all(map(torch.equal, weights(engine), before))
    assert not engine.step(batches(2)).numbers.skipped


def explained(engine: Engine, count: int) -> str:
    bad = batches(count)
    bad[1][0, 0] = torch.inf
    report = engine.explain(engine.step(iter(bad), count=count))
    return str(report)


def test_a_step_of_an_iterator_can_be_explained_with_attribution() -> None:
    assert "microbatch 1" in explained(make(), 3)
    assert explained(make(attribution=False), 3) == "None"
