from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from distmp.buckets.layout import ALIGNMENT, BucketLayout, check_parameters, plan_buckets
from distmp.errors import ConfigError
from tests.ranks import ranks

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
PARAMETERS = st.lists(st.tuples(SHAPES, KINDS), max_size=12).map(
    lambda kinds: [
        (f"p{index}", nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for index, (shape, dtype) in enumerate(kinds)
    ]
)


def names(layouts: Sequence[BucketLayout]) -> list[tuple[str, ...]]:
    return [layout.names for layout in layouts]


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.zeros(n, dtype=dtype))) for i, n in enumerate(sizes)]


@settings(deadline=None)
@given(named=PARAMETERS, bucket_bytes=st.integers(1, 4000))
def test_parameters_do_not_overlap(
    named: list[tuple[str, nn.Parameter]], bucket_bytes: int
) -> None:
    layouts = plan_buckets(named, bucket_bytes)
    placed = [
        (name, id(parameter))
        for layout in layouts
        for name, parameter in zip(layout.names, layout.parameters, strict=True)
    ]
    assert sorted(placed) == sorted((name, id(parameter)) for name, parameter in named)
    for layout in layouts:
        taken = torch.zeros(layout.size)
        for view in layout.views(taken):
            view += 1
        assert set(taken.tolist()) <= {0, 1}
        assert taken.sum() == sum(parameter.numel() for parameter in layout.parameters)
        assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
        assert layout.size % ALIGNMENT == 0


@settings(deadline=None)
@given(named=PARAMETERS, bucket_bytes=st.integers(1, 4000), ranks=st.integers(1, 5))
def test_shards_divide_every_parameter(
    named: list[tuple[str, nn.Parameter]], bucket_bytes: int, ranks: int
) -> None:
    for layout in plan_buckets(named, bucket_bytes, ALIGNMENT * ranks):
        flat = torch.arange(layout.size)
        shards = [layout.shard(rank, ranks) for rank in range(ranks)]
        for index, (name, offset) in enumerate(zip(layout.names, layout.offsets, strict=True)):
            elements = flat[offset : offset + layout.parameters[index].numel()]
            parts = [elements[layout.shard_range(index, shard)] for shard in shards]
            for part, shard in zip(parts, shards, strict=True):
                assert set(part.tolist()) == set(elements.tolist()) & set(flat[shard].tolist())
            ends = torch.tensor([0, *map(len, parts)]).cumsum(0)
            assert layout.shard_bounds(name, ranks) == ends.tolist()


@settings(deadline=None)
@given(named=PARAMETERS, bucket_bytes=st.integers(1, 4000))
def test_order_types_and_sizes_of_buckets(
    named: list[tuple[str, nn.Parameter]], bucket_bytes: int
) -> None:
    layouts = plan_buckets(named, bucket_bytes)
    by_dtype: dict[torch.dtype, list[BucketLayout]] = {}
    for layout in layouts:
        (dtype,) = {parameter.dtype for parameter in layout.parameters}
        by_dtype.setdefault(dtype, []).append(layout)
        without_last = sum(parameter.numel() for parameter in layout.parameters[:-1])
        assert without_last * 4 < bucket_bytes
    for dtype, of_one_kind in by_dtype.items():
        found = [name for layout in of_one_kind for name in layout.names]
        assert found == [name for name, p in reversed(named) if p.dtype == dtype]
        for layout in of_one_kind[:-1]:  # only the last one may be smaller
            assert sum(parameter.numel() for parameter in layout.parameters) * 4 >= bucket_bytes


def test_full_bucket_is_closed() -> None:
    assert names(plan_buckets(parameters(1, 5, 3, 4, 2), bucket_bytes=4 * 5)) == [
        ("p4", "p3"),
        ("p2", "p1"),
        ("p0",),
    ]


def test_small_models_have_one_bucket_and_empty_ones_none() -> None:
    assert len(plan_buckets(parameters(1000, 1000))) == 1
    assert plan_buckets([]) == []


def test_a_shared_parameter_is_laid_out_once_under_its_first_name() -> None:
    (one, shared), (_, other) = parameters(2, 3)
    assert names(plan_buckets([(one, shared), ("other", other), ("again", shared)])) == [
        ("other", "p0")
    ]


@pytest.mark.parametrize(
    "parameter",
    [
        torch.zeros(()),
        torch.zeros(3, 4).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 4).permute(1, 2, 0),
    ],
    ids=["scalar", "transposed", "channels_last", "permuted"],
)
def test_views_have_the_shape_and_memory_order_of_their_parameters(
    parameter: torch.Tensor,
) -> None:
    (layout,) = plan_buckets(
        [*parameters(5), ("odd", nn.Parameter(parameter)), ("z", nn.Parameter(torch.zeros(2)))]
    )
    flat = torch.arange(float(layout.size))
    view = layout.views(flat)[1]
    assert view.shape == parameter.shape
    assert view.stride() == parameter.stride()
    assert sorted(view.flatten().tolist()) == list(range(ALIGNMENT, ALIGNMENT + parameter.numel()))
    view.zero_()
    assert flat[ALIGNMENT : ALIGNMENT + parameter.numel()].abs().sum() == 0


def test_a_parameter_with_gaps_gets_a_dense_view() -> None:
    gaps = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    assert not gaps.is_contiguous()
    (layout,) = plan_buckets([("gaps", gaps)])
    (view,) = layout.views(torch.zeros(layout.size))
    assert view.is_contiguous()
    assert view.shape == (4, 3)


@ranks(1)
def test_parameters_without_values_of_their_own_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    for parameter in (
        nn.Parameter(distribute_tensor(torch.zeros(4), mesh)),
        nn.Linear(2, 2, device="meta").weight,
        nn.LazyLinear(2).weight,
    ):
        with pytest.raises(ConfigError, match=r"'p': is a DTensor, lazy or on the meta device"):
            check_parameters([("p", parameter)])
