from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distmp import Engine
from distmp.distributed import rank_monitor
from distmp.distributed.world import World
from distmp.errors import LostPeerError, TrainingError
from distmp.parallel import collective_order
from distmp.parallel.collective_order import CollectiveOrder, ComparedCollective
from tests.ended import look_ended
from tests.parallel.sharding import sharded
from tests.ranks import ranks
from tests.reference import (
    TWO_RANKS,
    Batch,
    Classifier,
    loss,
    make_engine,
    microbatches,
    replace_loss,
    samples,
    train,
)

A, B, C = (ComparedCollective("gather", unit, 10) for unit in range(3))
NAMES = ["", "blocks.0", "blocks.1"]


def run_pass(
    order: CollectiveOrder, collectives: list[ComparedCollective], kind: Any = "train"
) -> None:
    order.begin(kind)
    for collective in collectives:
        order.note(collective)
    order.end()


def impatient() -> None:
    """Let this rank ask soon what the others do."""
    collective_order.PATIENCE_SECONDS = 0.2


class Counted(CollectiveOrder):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.compared = 0

    def _compare(self, local: ComparedCollective) -> None:
        self.compared += 1
        super()._compare(local)


@ranks(2)
def test_ranks_compare_only_new_collectives() -> None:
    order = Counted(World.current("cpu"), NAMES)
    run_pass(order, [A, B])
    assert order.compared == 3  # with the end
    for _ in range(3):
        run_pass(order, [A, B])
    assert order.compared == 3
    run_pass(order, [A, C, B])
    assert order.compared == 6
    run_pass(order, [A], "evaluation")
    assert order.compared == 8
    run_pass(order, [A, C])  # shorter
    assert order.compared == 9
    order.begin("train")
    order.note(A)
    order.abandon()
    run_pass(order, [A, C])
    assert order.compared == 9


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (([B], [C]), "rank 0 is about to gather blocks.0 .10 elements., rank 1 is about to gather"),
        (([A, B], [A]), "rank 0 is about to gather blocks.0 .10 elements., rank 1 is about to end"),
        (
            ([A], [A._replace(kind="reduce", elements=4)]),
            "gather the model's own parameters .*, rank 1 is about to reduce gradients of the",
        ),
    ],
)
@ranks(2)
def test_a_difference_is_raised_on_all_ranks(mine: Any, message: str) -> None:
    impatient()
    order = CollectiveOrder(World.current("cpu"), NAMES)
    with pytest.raises(TrainingError, match=message):
        run_pass(order, mine[dist.get_rank()])


@ranks(2)
def test_deviating_rank_gets_an_error() -> None:
    order = CollectiveOrder(World.current("cpu"), NAMES, answer_seconds=0.5)
    run_pass(order, [A, B])
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        run_pass(order, [A, B])
        while not store.check(["raised"]):
            time.sleep(0.1)
    else:
        message = (
            r"rank 1 is about to gather blocks.1 .* no progress for 0.5 s: rank 0 is at .*sleep"
        )
        with pytest.raises(TrainingError, match=message):
            run_pass(order, [A, C])
        store.set("raised", "")


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.ones(100).sum()


@pytest.mark.nightly
@ranks(2)
def test_a_comparison_waits_for_a_rank_that_is_busy() -> None:
    rank_monitor.INTERVAL_SECONDS = 0.1
    order = CollectiveOrder(World.current("cpu"), NAMES, answer_seconds=4)
    run_pass(order, [A, B])
    if dist.get_rank() == 0:
        compute(5)
    run_pass(order, [A, C])


@ranks(2)
def test_rank_in_another_collective_is_detected() -> None:
    impatient()
    order = CollectiveOrder(World.current("cpu"), NAMES)
    run_pass(order, [A, B])
    dist.barrier()
    if dist.get_rank() == 0:
        run_pass(order, [A, B])
    else:
        with pytest.raises(TrainingError, match=r"rank 1 .* and rank 0 waits in barrier"):
            run_pass(order, [A, C])
    dist.barrier()


@ranks(2)
def test_ended_rank_is_not_reported_as_difference() -> None:
    impatient()
    order = CollectiveOrder(World.current("cpu"), NAMES)
    run_pass(order, [A, B])
    if dist.get_rank() == 1:
        look_ended()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(LostPeerError, match="another rank has ended"):
            run_pass(order, [A, C])
    dist.barrier()


@ranks(2)
def test_steps_of_different_lengths_are_an_error() -> None:
    impatient()
    for options in (sharded("fsdp"),):
        engine = make_engine(**options)
        batches = microbatches(0, [[3, 3], [3, 3]], dist.get_rank())
        engine.step(batches)
        engine.step(batches * 2)
        message = r"rank 0 is about to run a step of 2 .* rank 1 is about to run a step of 3 "
        with pytest.raises(TrainingError, match=message):
            engine.step(batches[:1] * (2 + dist.get_rank()))


def count_comparisons(engine: Engine) -> mock.Mock:
    """Return the mock of the comparisons of a sharded engine, which count from now on."""
    order = engine._setup.strategy._order  # type: ignore[attr-defined]
    order._compare = mock.Mock(wraps=order._compare)
    return order._compare


@ranks(2)
def test_a_forward_outside_of_a_step_is_compared() -> None:
    """A rank that runs it alone gets an error, not the collectives of another rank's step."""
    engine = make_engine(strategy="fsdp")
    train(engine, 2, TWO_RANKS)
    compared = count_comparisons(engine)
    engine.module(samples(0, 3).inputs)
    assert compared.call_count > 0


class Routed(Classifier):
    """Runs the given blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


@ranks(2, timeout=15)
def test_different_blocks_on_ranks_are_an_error() -> None:
    impatient()
    rank = dist.get_rank()
    for strategy in ("fsdp", "hsdp"):
        # Blocks of equal size, so that FSDP would mix them up; and one block less.
        for mine in ([rank, 1 - rank], [0, 1][: 1 + rank]):
            torch.manual_seed(0)
            model = Routed()
            engine = make_engine(model=model, strategy=strategy)
            model.order = mine
            with pytest.raises(TrainingError, match=r"ranks run different code.*blocks\.[01]"):
                train(engine, 1, TWO_RANKS)


def twice(model: nn.Module, batch: Batch) -> Any:
    """Run the model twice in one microbatch."""
    (first, weight), (second, _) = (loss(model, batch) for _ in range(2))
    return first + second, weight


@ranks(2)
def test_steady_run_does_not_query_ranks() -> None:
    for options in (sharded("fsdp"), sharded("fsdp", accumulate="sharded")):
        engine = make_engine(**options)
        replace_loss(engine, twice)
        train(engine, 1, TWO_RANKS)
        engine.evaluate([samples(0, 3)])
        train(engine, 1, TWO_RANKS, first=1)
        compared = count_comparisons(engine)
        train(engine, 2, TWO_RANKS, first=2)
        assert compared.call_count == 0


@ranks(2)
def test_parameters_that_only_one_rank_uses_are_right_within_a_block() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Linear(6, 5)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["ab"[dist.get_rank()]](x)

    batch = Batch(torch.ones(3, 6), torch.zeros(3, dtype=torch.int64))
    norms = []
    for strategy in ("ddp", "fsdp"):
        torch.manual_seed(0)
        engine = make_engine(model=Either(), strategy=strategy)
        norms.append(engine.step([batch]).numbers.grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
