"""Ranks that call the scaler differently: one error on all of them, before a weight has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distmp import DistributedGradScaler, TrainingError
from tests.ranks import run_ranks

ADVICE = "; make the same calls of the scaler in the same order on every rank"


class Work:
    """Two optimizers whose parameters start at different values, the same ones on each rank."""

    def __init__(self, *, fused: bool = False, **options: Any) -> None:
        self.parameters = [nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0)]
        self.optimizers = [torch.optim.SGD([p], lr=0.1, fused=fused) for p in self.parameters]
        self.scaler = DistributedGradScaler("cpu", init_scale=4.0, **options)
        self.scaler.scale(torch.ones(()))

    def backward(self, *values: float) -> None:
        for parameter, value in zip(self.parameters, values or (4.0, 8.0), strict=True):
            parameter.grad = torch.full((2,), value)

    def weights(self) -> list[list[float]]:
        return [parameter.tolist() for parameter in self.parameters]

    # What a rank does in an iteration

    def nothing(self) -> None:
        """Leave the iteration out."""

    def step_both(self) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.step(self.optimizers[1])
        self.scaler.update()

    def step_first(self) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.update()

    def step_second(self) -> None:
        self.scaler.step(self.optimizers[1])
        self.scaler.update()

    def step_reversed(self) -> None:
        self.scaler.step(self.optimizers[1])
        self.scaler.step(self.optimizers[0])
        self.scaler.update()

    def unscale_and_step_first(self) -> None:
        self.scaler.unscale_(self.optimizers[0])
        self.step_first()

    def unscale_both_and_step_first(self) -> None:
        self.scaler.unscale_(self.optimizers[1])
        self.step_first()

    def unscale_and_update(self) -> None:
        self.scaler.unscale_(self.optimizers[0])
        self.scaler.update()

    def clip_first(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers[0], 1.0)
        self.step_first()

    def clip_first_to_two(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers[0], 2.0)
        self.step_first()

    def clip_second(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers[1], 1.0)
        self.step_both()

    def clip_both(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers, 1.0)
        self.step_both()

    def clip_both_and_step_first(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers, 1.0)
        self.step_first()

    def clip_both_and_step_reversed(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers, 1.0)
        self.step_reversed()

    def only_update(self) -> None:
        self.scaler.update()

    def update_twice(self) -> None:
        self.step_first()
        self.scaler.update()

    def set_scale(self) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.update(4.0)


Calls = Callable[[Work], None]


def differ(first: list[Calls], second: list[Calls], options: dict[str, Any]) -> Any:
    """Do what is meant for this rank; return the error and the weights."""
    work = Work(**options)
    message = None
    try:
        for calls in first if dist.get_rank() == 0 else second:
            # Rank 1 overflows in the first iteration and in the second optimizer.
            overflow = dist.get_rank() == 1 and work.scaler._calls.iteration == 1
            work.backward(4.0, math.inf if overflow else 8.0)
            calls(work)
    except TrainingError as error:
        message = str(error)
    return message, work.weights()


Cases = list[tuple[list[Calls], list[Calls], str]]
# What the ranks do, and what they raise.
CASES: Cases = [
    (
        [Work.clip_first],
        [Work.step_first],
        "rank 0 calls clip_grad_norm_(optimizer 0, 1.0) in iteration 1, "
        "rank 1 calls step(optimizer 0) in iteration 1",
    ),
    (
        [Work.step_first, Work.step_first],
        [Work.step_first, Work.clip_first],
        "rank 0 calls step(optimizer 0) in iteration 2, "
        "rank 1 calls clip_grad_norm_(optimizer 0, 1.0) in iteration 2",
    ),
    (
        [Work.clip_first],
        [Work.clip_first_to_two],
        "rank 0 calls clip_grad_norm_(optimizer 0, 1.0) in iteration 1, "
        "rank 1 calls clip_grad_norm_(optimizer 0, 2.0) in iteration 1",
    ),
    (
        [Work.clip_first],
        [Work.clip_both],
        "rank 0 calls clip_grad_norm_(optimizer 0, 1.0) in iteration 1, "
        "rank 1 calls clip_grad_norm_(optimizers 0 and 1, 1.0) in iteration 1",
    ),
    (
        [Work.step_both, Work.step_both],
        [Work.step_both, Work.step_reversed],
        "rank 0 calls step(optimizer 0) in iteration 2, "
        "rank 1 calls step(optimizer 1) in iteration 2",
    ),
    (
        [Work.step_both],
        [Work.step_first, Work.step_both],
        "rank 0 calls step(optimizer 1) in iteration 1, "
        "rank 1 calls step(optimizer 0) in iteration 2",
    ),
    (
        [Work.step_first],
        [Work.only_update],
        "rank 0 calls step(optimizer 0) in iteration 1, rank 1 calls update() in iteration 1",
    ),
    (
        [Work.step_first, Work.step_first],
        [Work.update_twice],
        "rank 0 calls step(optimizer 0) in iteration 2, rank 1 calls update() in iteration 2",
    ),
    (
        [Work.unscale_and_update],
        [Work.unscale_and_step_first],
        "rank 0 calls update() for optimizer 0 in iteration 1, "
        "rank 1 calls step(optimizer 0) in iteration 1",
    ),
    (
        [Work.unscale_both_and_step_first],
        [Work.step_first],
        "rank 0 calls step(optimizer 0) for optimizers 0 and 1 in iteration 1, "
        "rank 1 calls step(optimizer 0) in iteration 1",
    ),
    (
        [Work.step_first, Work.step_first],
        [Work.set_scale, Work.step_first],
        "rank 0 called step(optimizer 0) and update() in iteration 1, "
        "rank 1 called step(optimizer 0) and update(new_scale) in iteration 1",
    ),
]


def play(cases: list[tuple[list[Calls], list[Calls]]], options: dict[str, Any]) -> list[Any]:
    """Do what is meant for this rank in each case; return the errors and the weights."""
    return [differ(first, second, options) for first, second in cases]


def outcomes(
    cases: list[tuple[list[Calls], list[Calls]]], **options: Any
) -> list[tuple[list[str | None], list[Any]]]:
    """Return the errors and the weights of both ranks for each case."""
    by_rank = run_ranks(play, 2, cases, options)
    return [([e for e, _ in seen], [w for _, w in seen]) for seen in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_raise_what_each_has_called(fused: bool) -> None:
    seen = outcomes([(first, second) for first, second, _ in CASES], fused=fused)
    for (_, _, calls), (errors, weights) in zip(CASES, seen, strict=True):
        assert errors == [f"ranks call the scaler differently: {calls}{ADVICE}"] * 2
        assert weights[0] == weights[1]


@pytest.mark.parametrize("fused", [False, True])
def test_another_order_from_the_first_step_on(fused: bool) -> None:
    ((errors, weights),) = outcomes([([Work.step_both], [Work.step_reversed])], fused=fused)
    optimizer = "SGD with 1 parameter, the first of shape (2,)"
    message = (
        "ranks use their optimizers in a different order: step(optimizer 0) in iteration 1 is "
        f"{optimizer} on rank 0, but another one, {optimizer} on rank 1{ADVICE}"
    )
    assert errors == [message] * 2
    assert weights == [[[1.0, 1.0], [2.0, 2.0]]] * 2


def test_a_step_that_one_rank_leaves_out_after_a_common_decision() -> None:
    """Nobody can know before the next decision; the error says that weights differ."""
    one, other = [Work.clip_both, Work.clip_both], [Work.clip_both_and_step_first, Work.clip_both]
    # Not in the first iteration, in which rank 1 has an overflow.
    ((errors, _),) = outcomes([([Work.clip_both, *one], [Work.clip_both, *other])])
    assert (
        errors
        == [
            "ranks call the scaler differently: "
            "rank 0 called step(optimizers 0 and 1) and update() in iteration 2, "
            f"rank 1 called step(optimizer 0) and update() in iteration 2{ADVICE}, "
            "and continue from a checkpoint, for weights differ between ranks"
        ]
        * 2
    )


HARMLESS: list[tuple[list[Calls], list[Calls]]] = [
    ([Work.clip_both] * 2, [Work.clip_both_and_step_reversed] * 2),
    ([Work.step_first] * 2, [Work.unscale_and_step_first] * 2),
]


@pytest.mark.parametrize("fused", [False, True])
def test_differences_that_change_nothing_are_allowed(fused: bool) -> None:
    for errors, weights in outcomes(HARMLESS, fused=fused):
        assert errors == [None, None]
        assert weights[0] == weights[1]
        assert weights[0] != [[1.0, 1.0], [2.0, 2.0]]


def test_unscaling_on_one_rank_is_refused_where_it_rounds_otherwise() -> None:
    case = ([Work.step_first], [Work.unscale_and_step_first])
    ((errors, weights),) = outcomes([case], fused=True, growth_factor=1.1)
    calls = (
        "rank 0 calls step(optimizer 0) in iteration 1, "
        "rank 1 calls step(optimizer 0) after unscale_(optimizer 0) in iteration 1"
    )
    assert errors == [f"ranks call the scaler differently: {calls}{ADVICE}"] * 2
    assert weights[0] == weights[1]
