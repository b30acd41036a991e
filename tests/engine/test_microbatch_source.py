"""Microbatches of a step that are drawn from an iterator, one at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.engine import Engine
from distmp.errors import ConfigError, TrainingError
from tests.ranks import ranks


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
    def __init__(self, items: list[Tensor], length: int | None = None) -> None:
        self.items = items
        self.length = len(items) if length is None else length

    def __len__(self) -> int:
        return self.length

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


@pytest.mark.parametrize("attribution", [True, False])
@pytest.mark.parametrize("first_step_checks", [True, False])
def test_a_microbatch_is_freed_before_the_next_is_drawn(
    attribution: bool, first_step_checks: bool
) -> None:
    engine = make(attribution=attribution, first_step_checks=first_step_checks)
    drawn: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def fresh() -> Iterator[Tensor]:
        for _ in range(4):
            alive.append(sum(reference() is not None for reference in drawn))
            batch = torch.randn(3, 3)
            drawn.append(weakref.ref(batch))
            yield batch
            del batch

    for _ in range(2):
        drawn.clear()
        engine.step(fresh(), count=4)
    assert alive == [0, 1, 2, 3, 0, 1, 2, 3] if attribution else alive == [0] * 8


@pytest.mark.parametrize(
    ("given", "count", "message"),
    [
        (lambda: iter(batches(2)), 3, "'ended after 2 of 3 microbatches': the step was not taken"),
        (lambda: iter(batches(4)), 3, "'has more than 3 microbatches': the step was not taken"),
        (lambda: Sized(batches(2), 3), None, "'ended after 2 of 3 microbatches'"),
        (lambda: Sized(batches(3), 2), None, "'has more than 2 microbatches'"),
        (lambda: iter(()), 3, "is empty; a step needs at least one microbatch"),
        (lambda: batches(2), 3, "count = 3: there are 2 microbatches; leave count out"),
        (lambda: batches(2), 0, "count = 0: use the number of microbatches"),
        (lambda: iter(batches(2)), 2.0, "count = 2.0: use the number of microbatches"),
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


@ranks(2)
def test_iterators_fail_on_all_ranks_together() -> None:
    rank = dist.get_rank()
    for strategy, counts in (
        ("ddp", (3, 2)),  # as with lists
        ("ddp", (2, 2)),
        ("fsdp", (2, 2)),
    ):
        listed, drawn = make(strategy=strategy), make(strategy=strategy)
        items = batches(counts[rank], rank)
        for _ in range(2):
            expected = listed.step(items).numbers
            assert drawn.step(iter(items), count=len(items)).numbers == expected
        before = drawn.state_dict()["engine/counts"].tolist()
        for given, message in (
            ((1, 2), "'ended after 1 of 2 microbatches on rank 0; is complete on rank 1'"),
            ((1, 1), "ended after 1 of 2 microbatches"),
            ((2, 3), "'is complete on rank 0; has more than 2 microbatches on rank 1'"),
        ):
            error: type[Exception] = ConfigError
            if strategy == "fsdp" and given == (1, 2):  # seen before the second microbatch
                error = TrainingError
                message = (
                    "rank 0 is about to end the microbatches, rank 1 is about to run another "
                    "microbatch"
                )
            with pytest.raises(error, match=message):
                drawn.step(iter(batches(given[rank], rank)), count=2)
        assert drawn.state_dict()["engine/counts"].tolist()[0] == before[0]
        # Every rank can continue, from the same weights.
        expected = listed.step(items).numbers
        numbers = drawn.step(iter(items), count=len(items)).numbers
        assert (numbers.loss, numbers.weight) == (expected.loss, expected.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@ranks(2, cuda=True)
def test_on_a_gpu_the_error_comes_from_check_or_the_next_step() -> None:
    rank = dist.get_rank()
    engine = Engine(
        nn.Linear(3, 2),
        loss,
        lambda named: torch.optim.AdamW(named, lr=0.1, fused=True),
        policy="fp32",
        device="cuda",
        first_step_checks=False,
    )
    assert not engine.host_waits
    message = "'is complete on rank 0; ended after 1 of 2 microbatches on rank 1'"
    for way in ("check", "step"):
        engine.step(batches(2))
        outcome = engine.step(iter(batches(2 - rank)), count=2)
        with pytest.raises(ConfigError, match=message):
            engine.check(outcome) if way == "check" else engine.step(batches(2))
        assert outcome.numbers.skipped
        engine.check(engine.step(batches(2)))
