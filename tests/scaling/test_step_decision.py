from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distmp.scaling.step_decision import (
    GradientPart,
    StepDecision,
    all_reduce_stats,
    decide_step,
    local_stats,
)
from tests.ranks import ranks
from tests.recording import Operators, no_waiting

CPU = torch.device("cpu")


def decision(
    gradients: list[Tensor],
    *,
    loss_sum: float = 6.0,
    weight: float = 4.0,
    scale: float = 1.0,
    nominal: float = 1.0,
    max_norm: float | None = None,
    stop: bool = False,
) -> StepDecision:
    measured = local_stats(
        [GradientPart(gradients, replicas=1)],
        [torch.tensor(loss_sum)],
        [torch.tensor(weight)],
        stop=stop,
        device=CPU,
    )
    return decide_step(measured, torch.tensor(scale), nominal, max_norm)


def random_gradients(seed: int, sizes: tuple[int, ...] = (3, 1000, 1)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


def float64_norm(gradients: list[Tensor]) -> float:
    return float(np.linalg.norm(np.concatenate([g.double().numpy().ravel() for g in gradients])))


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    weight=st.integers(1, 10**6),
    scale_exponent=st.integers(-2, 24),
    nominal_exponent=st.integers(0, 20),
    max_norm=st.none() | st.floats(1e-3, 1e3),
)
def test_verdict_is_that_of_float64(
    seed: int,
    weight: int,
    scale_exponent: int,
    nominal_exponent: int,
    max_norm: float | None,
) -> None:
    scale, nominal = 2.0**scale_exponent, 2.0**nominal_exponent
    mean = [gradient / 7 for gradient in random_gradients(seed)]
    held = [gradient * (scale * weight / nominal) for gradient in mean]  # G = u g
    found = decision(
        held, loss_sum=2.5 * weight, weight=weight, scale=scale, nominal=nominal, max_norm=max_norm
    )
    norm = float64_norm(mean)
    assert found.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    assert found.loss.item() == pytest.approx(2.5, rel=1e-6)
    assert found.weight.item() == weight
    assert [flag.item() for flag in (found.overflow, found.empty, found.stop)] == [False] * 3
    assert found.found_inf.item() == 0
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    updated = torch.cat(held).double() / found.grad_scale.double()
    expected = clip * torch.cat(mean).double()
    torch.testing.assert_close(updated, expected, rtol=2e-6, atol=0)
    assert found.found_inf.dtype == found.grad_scale.dtype == torch.float32
    assert found.found_inf.dim() == found.grad_scale.dim() == 0


def test_clipping_is_that_of_torch() -> None:
    gradients = random_gradients(3)
    holder = torch.nn.Parameter(torch.zeros(1004))
    holder.grad = torch.cat(gradients) / 4
    norm = torch.nn.utils.clip_grad_norm_([holder], 0.5)
    found = decision(gradients, max_norm=0.5)
    assert found.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    torch.testing.assert_close(torch.cat(gradients) / found.grad_scale, holder.grad)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_zero_gradient_is_applied(max_norm: float | None) -> None:
    found = decision([torch.zeros(5)], max_norm=max_norm)
    assert found.found_inf == 0
    assert found.grad_norm == 0
    assert found.grad_scale == 4


def test_step_without_gradients() -> None:
    assert decision([]).grad_norm == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_one_nonfinite_element(value: float, place: int, max_norm: float | None) -> None:
    gradients = random_gradients(1)
    gradients[place][-1] = value
    found = decision(gradients, max_norm=max_norm)
    assert found.overflow
    assert found.found_inf == 1
    assert not found.empty
    assert not found.grad_norm.isfinite()


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -4.0])
def test_nonfinite_or_negative_loss_weight(weight: float) -> None:
    found = decision(random_gradients(1), weight=weight)
    # Not empty: an empty step would not change the loss scale.
    assert (found.empty, found.overflow, found.found_inf) == (False, True, 1)


def test_loss_weight_of_zero() -> None:
    found = decision([torch.zeros(5)], weight=0.0, loss_sum=0.0, max_norm=1.0)
    assert (found.empty, found.overflow, found.found_inf) == (True, False, 1)


def test_empty_and_overflowing_at_once_is_one_skip() -> None:
    found = decision([torch.tensor([math.nan])], weight=0.0)
    assert (found.empty, found.overflow, found.found_inf) == (True, True, 1)


def test_small_gradients_are_not_lost_in_the_norm() -> None:
    found = decision([torch.full((1000,), 1e-18)], weight=1.0)
    assert found.grad_norm.item() == pytest.approx(1e-18 * 1000**0.5, rel=1e-6)


def test_norm_of_many_elements_is_precise() -> None:
    gradient = torch.rand(4_000_000, generator=torch.Generator().manual_seed(0)) + 0.5
    assert decision([gradient], weight=1.0).grad_norm.item() == pytest.approx(
        float64_norm([gradient]), rel=2e-6
    )


# Over ranks


@ranks(2)
def test_replicas_count_once_and_shards_add_up() -> None:
    rank = dist.get_rank()
    everywhere, shards = random_gradients(1), [random_gradients(2), random_gradients(3)]
    measured = local_stats(
        [GradientPart(everywhere, replicas=2), GradientPart(shards[rank], replicas=1)],
        [torch.tensor([10.0, 3.0][rank])],
        [torch.tensor([3, 1][rank])],
        stop=rank == 1,
        device=CPU,
    )
    found = decide_step(all_reduce_stats(measured, dist.group.WORLD), torch.tensor(1.0), 1.0, None)
    norm = float64_norm([*everywhere, *shards[0], *shards[1]])
    assert found.grad_norm.item() == pytest.approx(norm / 4, rel=1e-6)
    assert found.loss.item() == 13 / 4
    assert found.weight == 4
    assert found.stop


SPOILERS: list[Callable[[Tensor], object]] = [
    lambda gradient: gradient.fill_(math.nan),
    lambda gradient: gradient.fill_(math.inf),
    lambda gradient: gradient[0].fill_(-math.inf),
]


@ranks(2)
def test_nonfinite_values_are_detected_on_every_rank() -> None:
    for spoiled in range(2):
        for spoil in SPOILERS:
            gradients = random_gradients(dist.get_rank())
            if dist.get_rank() == spoiled:
                spoil(gradients[0])
            measured = local_stats(
                [GradientPart(gradients, replicas=1)],
                [torch.tensor(1.0)],
                [torch.tensor(1.0)],
                stop=False,
                device=CPU,
            )
            found = decide_step(
                all_reduce_stats(measured, dist.group.WORLD), torch.tensor(1.0), 1.0, 1.0
            )
            assert found.found_inf == 1
            assert found.overflow


def test_single_process_adds_no_collective() -> None:
    measured = torch.arange(5.0)
    assert all_reduce_stats(measured, None) is measured
    assert measured.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.gpu
def test_a_gpu_launches_as_much_for_many_gradients_as_for_few() -> None:
    found = []
    for count in (2, 20):
        gradients = [torch.ones(8, device="cuda") for _ in range(count)]
        with no_waiting(), Operators() as operators:
            part = GradientPart(gradients, 1)
            one = torch.ones((), device="cuda")
            stats = local_stats([part], [one], [one], stop=False, device=one.device)
        found.append(operators.counts)
        assert stats[0].item() == pytest.approx(8 * count)
    assert found[0] == found[1]


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_a_step_whose_microbatches_were_all_dropped_is_an_overflow(dropped: int) -> None:
    total = torch.tensor([0.0, 0.0, 0.0, dropped, 0.0], dtype=torch.float64)
    decision = decide_step(total, torch.ones(()), nominal_weight=1.0, max_norm=None)
    assert bool(decision.overflow) == (dropped > 0)
    assert bool(decision.empty) == (dropped == 0)
    assert decision.found_inf == 1
