"""`Engine.gather`: each sample once, in order, on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from distmp.distributed.world import World
from distmp.engine.evaluation import _once_in_order, gather_rows
from distmp.errors import ConfigError
from tests.ranks import ranks
from tests.reference import make_engine

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
)
SAMPLES = 11  # not a multiple of the number of ranks, nor of the batch size


@ranks(3)
def test_all_rows_arrive_in_rank_order_with_their_dtype() -> None:
    engine = make_engine(strategy="ddp")
    rank = engine.world.rank
    counts = (2, 0, 3)
    first = sum(counts[:rank])
    rows = torch.arange(first, first + counts[rank])
    for dtype in DTYPES:
        expected = torch.arange(5.0).reshape(5, 1).expand(5, 2).to(dtype)
        found = engine.gather({"a": rows[:, None].expand(-1, 2).float().to(dtype)})["a"]
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
    nested = engine.gather({"x": (rows, [rows.float()]), "y": {"z": rows.bool()}})
    assert torch.equal(nested["x"][0], torch.arange(5))
    assert torch.equal(nested["x"][1][0], torch.arange(5.0))
    assert torch.equal(nested["y"]["z"], torch.arange(5).bool())
    assert engine.gather(torch.tensor(float(rank))).tolist() == [0.0, 1.0, 2.0]
    weight = next(engine.module.parameters())
    assert not engine.gather(weight).requires_grad
    columns = torch.stack([rows, -rows], dim=1)
    assert torch.equal(engine.gather(columns[:, 0], samples=columns[:, 0]), torch.arange(5))
    conjugate = torch.complex(rows.float(), rows.float()).conj()
    assert torch.equal(engine.gather(conjugate).imag, -torch.arange(5.0))
    assert engine.gather(torch.zeros(0, 4)).shape == (0, 4)
    assert engine.gather(torch.zeros(1, 0)).shape == (3, 0)


@ranks(2)
def test_a_distributed_sampler_repeats_samples_and_the_result_does_not() -> None:
    engine = make_engine(strategy="ddp")
    data = torch.arange(SAMPLES)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=3)  # type: ignore[arg-type]
    numbers = torch.cat([*DataLoader(data, batch_size=4, sampler=sampler)])  # type: ignore[arg-type]
    values = {"number": numbers, "correct": numbers % 3 == 0}
    everything = engine.gather(values)
    assert len(everything["number"]) == SAMPLES + 1, "torch repeats one"
    once = engine.gather(values, samples=values["number"])
    assert torch.equal(once["number"], data)
    assert once["correct"].float().mean() == (data % 3 == 0).float().mean()
    padded = torch.where(values["number"] % 2 == 0, values["number"], -1)
    even = engine.gather(values["number"], samples=padded)
    assert torch.equal(even, data[::2])


@ranks(2)
def test_ungatherable_values_are_named_on_all_ranks() -> None:
    engine = make_engine(strategy="ddp")
    first = engine.world.rank == 0
    two, three = torch.ones(2), torch.ones(3)
    for values, samples, message in (
        (two if first else two.double(), None, "tensor 0 of values = rows of shape () and float32"),
        (two if first else torch.ones(2, 2), None, "rows of shape (2,) and float32 on rank 1"),
        ({"a": two} if first else {"b": two}, None, "structure of values = "),
        (two if first else 1.0, None, "values = 'float': is not a tensor; gather tensors with"),
        ({"a": two, "b": three}, None, "number of rows = '2 and 3': must be the same in all"),
        (two, three.long(), "number of rows = '2 and 3'"),
        (two, two, "samples = '(2,) and float32': must be integers of shape (rows,)"),
        (two, two.bool(), "samples = '(2,) and bool': must be integers of shape (rows,)"),
        (two, two.cfloat(), "samples = '(2,) and complex64': must be integers of shape"),
        (two, two.long() if first else two.int(), "samples = rows of shape () and int64"),
        (two, [0, 1], "values = 'list': is not a tensor"),
        ({}, None, "has no tensor to gather"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            engine.gather(values, samples)
    assert len(engine.gather(two)) == 4


@settings(deadline=None, max_examples=60)
@given(numbers=st.lists(st.integers(-2, 6), max_size=12))
def test_each_sample_is_kept_once(numbers: list[int]) -> None:
    chosen = _once_in_order(torch.tensor(numbers, dtype=torch.int32)).tolist()
    assert [numbers[index] for index in chosen] == sorted({n for n in numbers if n >= 0})
    assert all(numbers.index(numbers[index]) == index for index in chosen)
    rows = torch.arange(len(numbers)) * 2
    if numbers:
        found = gather_rows(rows, torch.tensor(numbers), World.current("cpu"))
        assert found.tolist() == [2 * index for index in chosen]
