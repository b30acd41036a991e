"""Ranks that call the scaler differently raise one error before a weight changes."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp import DistributedGradScaler, TrainingError
from distmp.distributed import rank_monitor
from distmp.utils.host_copy import HostCopy
from tests.ranks import in_turn, ranks, run_ranks

ADVICE = "; make the same calls of the scaler in the same order on every rank"


class Work:
    """Two optimizers with different parameter values, which are the same on each rank."""

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

    # Iterations of a rank

    def nothing(self) -> None:
        """Do nothing in this iteration."""

    def step_both(self) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.step(self.optimizers[1])
        self.scaler.update()

    def step_first(self) -> None:
        self.scaler.step(self.optimizers[0])
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

    def clip_both(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers, 1.0)
        self.step_both()

    def clip_both_and_step_first(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers, 1.0)
        self.step_first()

    def clip_both_and_step_reversed(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizers, 1.0)
        self.step_reversed()

    def set_scale(self) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.update(4.0)


Calls = Callable[[Work], None]


def differ(first: list[Calls], second: list[Calls], options: dict[str, Any]) -> Any:
    """Run the iterations of this rank; return the error and the weights."""
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
# The iterations of the ranks, and the error that they raise.
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
        [Work.unscale_and_update],
        [Work.unscale_and_step_first],
        "rank 0 calls update() for optimizer 0{0} in iteration 1, "
        "rank 1 calls step(optimizer 0){0} in iteration 1",
    ),
    (
        [Work.unscale_both_and_step_first],
        [Work.step_first],
        "rank 0 calls step(optimizer 0) for optimizers 0 and 1{1} in iteration 1, "
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
    """Run the iterations of this rank in each case; return the errors and the weights."""
    rank_monitor.INTERVAL_SECONDS = 0.1
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
    # Only the step of a fused optimizer may round otherwise after it was unscaled.
    unscaled = [f" after unscale_(optimizer {number})" if fused else "" for number in (0, 1)]
    for (_, _, calls), (errors, weights) in zip(CASES, seen, strict=True):
        message = f"ranks call the scaler differently: {calls.format(*unscaled)}{ADVICE}"
        assert errors == [message] * 2
        assert weights[0] == weights[1]


@pytest.mark.parametrize("fused", [False, True])
def test_different_order_from_the_first_step(fused: bool) -> None:
    ((errors, weights),) = outcomes([([Work.step_both], [Work.step_reversed])], fused=fused)
    optimizer = r"SGD with 1 parameter, the first of shape \(2,\), checksum \w{8}"
    message = (
        r"ranks use their optimizers in a different order: step\(optimizer 0\) in iteration 1 is "
        f"{optimizer} on rank 0, but {optimizer} on rank 1{ADVICE}"
    )
    assert re.fullmatch(message, errors[0])
    assert errors[0] == errors[1]
    assert weights == [[[1.0, 1.0], [2.0, 2.0]]] * 2


def test_a_step_that_one_rank_leaves_out_after_a_common_decision() -> None:
    """The next decision detects it; the error says that weights differ."""
    one, other = [Work.clip_both, Work.clip_both], [Work.clip_both_and_step_first, Work.clip_both]
    # Not in the first iteration, in which rank 1 has an overflow.
    ((errors, _),) = outcomes([([Work.clip_both, *one], [Work.clip_both, *other])])
    assert (
        errors
        == [
            "ranks call the scaler differently: "
            "rank 0 called step(optimizers 0 and 1) and update() in iteration 2, "
            f"rank 1 called step(optimizer 0) and update() in iteration 2{ADVICE}; "
            "weights now differ between ranks: continue from a checkpoint"
        ]
        * 2
    )


@pytest.mark.parametrize("fused", [False, True])
def test_the_order_of_steps_after_a_common_decision_may_differ(fused: bool) -> None:
    case = ([Work.clip_both] * 2, [Work.clip_both_and_step_reversed] * 2)
    for errors, weights in outcomes([case], fused=fused):
        assert errors == [None, None]
        assert weights[0] == weights[1]
        assert weights[0] != [[1.0, 1.0], [2.0, 2.0]]


def test_unscaling_on_one_rank_is_refused_where_it_may_round_otherwise() -> None:
    case = ([Work.step_first], [Work.unscale_and_step_first])
    ((errors, weights),) = outcomes([case], fused=True)
    calls = (
        "rank 0 calls step(optimizer 0) in iteration 1, "
        "rank 1 calls step(optimizer 0) after unscale_(optimizer 0) in iteration 1"
    )
    assert errors == [f"ranks call the scaler differently: {calls}{ADVICE}"] * 2
    assert weights[0] == weights[1]


@ranks(3)
def test_ranks_with_equal_calls_are_named_together() -> None:
    work = Work()
    work.backward()
    call = work.clip_first if dist.get_rank() == 1 else work.step_first
    message = (
        "ranks call the scaler differently: "
        "ranks 0, 2 call step(optimizer 0) in iteration 1, "
        f"rank 1 calls clip_grad_norm_(optimizer 0, 1.0) in iteration 1{ADVICE}"
    )
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}$"):
        call()


@ranks(2)
@in_turn("fused", [False, True])
def test_stages_of_a_pipeline_have_other_parameters(fused: bool) -> None:
    me = dist.get_rank()
    parameters = [nn.Parameter(torch.ones(2 + me)), nn.Parameter(torch.ones(3))]
    optimizers = [torch.optim.SGD([p], lr=0.5, fused=fused) for p in parameters]
    scaler = DistributedGradScaler("cpu", init_scale=4.0)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, scaler.get_scale())
        if me == step == 1:
            assert parameters[0].grad is not None
            parameters[0].grad[0] = math.inf
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert [p.tolist() for p in parameters] == [[0.0] * (2 + me), [0.0] * 3]
    assert (scaler.total_skips, scaler.get_scale()) == (1, 2.0)


class LateCopy(HostCopy):
    """Numbers that arrive only if the host waits for them, like those of a busy CUDA device."""

    is_complete = False  # type: ignore[assignment]

    def __init__(self, values: Tensor) -> None:
        super().__init__(values)
        self.on_device = True


def differ_on_a_device(first: list[Calls], second: list[Calls]) -> Any:
    with mock.patch("distmp.scaling.grad_scaler.HostCopy", LateCopy):
        work, weights, message, iteration = Work(fused=True), [], None, 0
        try:
            for calls in first if dist.get_rank() == 0 else second:
                work.backward()
                calls(work)
                iteration += 1
                weights.append(work.weights())
        except TrainingError as error:
            message = str(error)
        return message, iteration, weights, work.weights()


def test_on_a_device_all_ranks_skip_at_once_and_raise_at_the_next_update() -> None:
    """The host does not wait for the device, so it detects the difference one update later."""
    first = [Work.step_first, Work.clip_first, Work.step_first, Work.step_first]
    second = [Work.step_first, Work.step_first, Work.step_first, Work.step_first]
    seen = run_ranks(differ_on_a_device, 2, first, second)
    assert seen[0] == seen[1]
    message, iteration, after, finally_ = seen[0]
    calls = (
        "rank 0 calls clip_grad_norm_(optimizer 0, 1.0) in iteration 2, "
        "rank 1 calls step(optimizer 0) in iteration 2"
    )
    assert message == f"ranks call the scaler differently: {calls}{ADVICE}"
    assert iteration == 2
    assert after[0] != [[1.0, 1.0], [2.0, 2.0]]
    assert after[0] == after[1] == finally_


@ranks(2)
def test_clipping_with_a_disabled_scaler_is_compared_as_well() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DistributedGradScaler("cpu", enabled=False)
    assert scaler.clip_grad_norm_(optimizer, 10.0).item() == 5.0
    with pytest.raises(TrainingError, match=r"rank 1 calls clip_grad_norm_\(optimizer 0, 2.0\) in"):
        scaler.clip_grad_norm_(optimizer, 1.0 + dist.get_rank())
    assert parameter.grad.tolist() == [3.0, 4.0]


@ranks(2)
def test_copies_continue_on_several_ranks() -> None:
    work = Work()
    for copied in (lambda scaler: scaler, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))):
        work.scaler = copied(work.scaler)
        work.backward()
        work.step_first()
    assert work.weights()[0] == pytest.approx([0.7] * 2)


@ranks(2)
def test_new_process_group_resets_the_call_log(tmp_path: Path) -> None:
    """A restarted rank joins others that keep their scaler."""
    work = Work()
    work.backward()
    work.step_first()
    if dist.get_rank() == 1:
        work.scaler = Work().scaler
    dist.destroy_process_group()
    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(tmp_path / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size)
    work.backward()
    work.step_first()
    assert work.weights()[0] == pytest.approx([0.8] * 2)


@ranks(2)
def test_a_steady_step_costs_one_reduction_and_no_key_of_the_store() -> None:
    work = Work()
    monitor = rank_monitor.current()
    assert monitor is not None
    work.backward()
    work.clip_both()
    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
        mock.patch.object(monitor, "_store", wraps=monitor._store) as store,
        mock.patch.object(rank_monitor, "open_store") as connect,
    ):
        for _ in range(10):
            work.backward()
            work.clip_both()
    assert reduce.call_count == 10
    assert {call[0] for call in store.method_calls} <= {"check"}
    connect.assert_not_called()


@ranks(2)
def test_gradients_that_no_rank_has_scaled_are_warned_of_once() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DistributedGradScaler("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            parameter.grad = torch.ones(2)
            scaler.step(optimizer)
            scaler.update()
    (warning,) = caught
    assert "no rank has ever called scale()" in str(warning.message)
    assert warning.filename == __file__


def test_gradients_that_are_cleared_before_the_step_are_warned_of() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DistributedGradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    optimizer.zero_grad()
    scaler.step(optimizer)
    with pytest.warns(RuntimeWarning, match="no rank has had a gradient, so nothing was updated"):
        scaler.update()


@ranks(2)
def test_a_rank_without_a_loss_of_its_own_is_not_warned() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DistributedGradScaler("cpu")
    if dist.get_rank() == 0:
        scaler.scale(parameter.sum()).backward()
    else:
        parameter.grad = torch.full((2,), 2.0**16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
        scaler.update()
    assert parameter.tolist() == [-1, -1]


@ranks(2, timeout=60)
def test_update_without_the_first_step_on_one_rank() -> None:
    work = Work()
    work.backward()
    calls = work.scaler.update if dist.get_rank() else work.step_first
    with pytest.raises(TrainingError, match="ranks call the scaler differently: "):
        calls()
    assert work.weights() == [[1.0, 1.0], [2.0, 2.0]]
