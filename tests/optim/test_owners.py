from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distmp.distributed import collectives
from distmp.optim import owners
from distmp.optim.owners import Owners, ShardedMatrix, assign
from tests.ranks import from_all_ranks, in_turn, ranks

SHAPES = [(5, 3), (4, 4), (1, 7), (6, 2), (8, 8), (2, 2)]


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 6))
def test_work_is_assigned_once_and_balanced(costs: list[int], count: int) -> None:
    owned = assign(costs, count)
    assert len(owned) == count
    assert sorted(index for indices in owned for index in indices) == list(range(len(costs)))
    loads = [sum(costs[index] for index in indices) for indices in owned]
    # No rank could give its cheapest piece to another one.
    for load, indices in zip(loads, owned, strict=True):
        assert load - min((costs[index] for index in indices), default=0) <= min(loads)
    if costs and len(costs) <= count:
        assert max(loads) == max(costs)


def test_expensive_work_is_assigned_first() -> None:
    assert assign([1, 1, 1, 1, 1, 1, 6], 2) == [[6], [0, 1, 2, 3, 4, 5]]


def _bounds(size: int, count: int, kind: str) -> list[int]:
    """Divide elements over ranks: evenly, with empty shards, or all on the last rank."""
    if kind == "even":
        return [rank * size // count for rank in range(count + 1)]
    return [0] * count + [size] if kind == "last" else [0, *[min(2, size)] * (count - 1), size]


@ranks(3)
@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("limit", [1, 20, 10**6])
def test_owners_compute_full_matrices_and_return_shards(limit: int, dtype: torch.dtype) -> None:
    group = dist.group.WORLD
    assert group is not None
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    for value in values:
        dist.broadcast(value, 0)
    kinds = ["even", "last", "few"] * 2
    matrices = [
        ShardedMatrix(value.shape, _bounds(value.numel(), 3, kind))
        for value, kind in zip(values, kinds, strict=True)
    ]
    part = [slice(*m.bounds[group.rank() : group.rank() + 2]) for m in matrices]
    held: list[int] = []
    calls: list[int] = []
    exchange = collectives.all_to_all

    def counted(received: Tensor, *arguments: object) -> dist.Work:
        calls.append(received.numel())
        return exchange(received, *arguments)  # type: ignore[arg-type]

    def double(matrix: Tensor) -> Tensor:
        held.extend(i for i, value in enumerate(values) if torch.equal(matrix, value))
        return matrix.T.contiguous().T * 2  # another memory layout

    owners.all_to_all = counted  # type: ignore[assignment]
    try:
        plan = Owners(matrices, [m.shape.numel() for m in matrices], group, limit)
        results = dict(plan.compute(lambda i: values[i].reshape(-1)[part[i]], double))
    finally:
        owners.all_to_all = exchange
    assert results.keys() == set(range(len(SHAPES)))
    for index, result in results.items():
        assert torch.equal(result, 2 * values[index].reshape(-1)[part[index]])
    owned = from_all_ranks(held)
    assert sorted(index for indices in owned for index in indices) == list(range(len(SHAPES)))
    # Two exchanges per round; a rank receives one matrix, or several of at most `limit` elements.
    assert len(calls) == 2 * (1 if limit == 10**6 else max(map(len, owned)) if limit == 1 else 2)
    assert max(calls[::2], default=0) <= max(limit, 64)


@pytest.mark.gpu
@ranks(2, cuda=True)
def test_two_gpus_exchange_matrices() -> None:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    matrices = [ShardedMatrix(value.shape, _bounds(value.numel(), 2, "even")) for value in values]
    part = [slice(*m.bounds[group.rank() : group.rank() + 2]) for m in matrices]
    shards = [value.cuda().reshape(-1)[of] for value, of in zip(values, part, strict=True)]
    plan = Owners(matrices, [m.shape.numel() for m in matrices], group, 20)
    for _ in range(2):
        results = dict(plan.compute(lambda i: 1 * shards[i], lambda matrix: 2 * matrix))
        for index, result in results.items():
            shards[index] = result / 2
    for index, result in results.items():
        assert torch.equal(result.cpu(), 2 * values[index].reshape(-1)[part[index]])
