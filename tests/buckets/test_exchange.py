from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.exchange import Costs
from distmp.buckets.reduction import SUMS_PER_BLOCK, AllToAllReduce, sum_pairwise, sum_rows
from distmp.distributed.collectives import exchange_groups
from tests.machines import AllToAllTraffic, pretend
from tests.ranks import ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")
BLOCK = SUMS_PER_BLOCK["cpu"]


def pieces(count: int, length: int, dtype: torch.dtype = FP32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * count + length)
    return torch.randn(count, length, generator=generator).to(dtype)


def total(function: Any, rows: Tensor) -> Tensor:
    out = torch.empty(rows.shape[1])
    function(rows.clone(), out)
    return out


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def launches(function: Any, count: int, length: int, dtype: torch.dtype, device: str) -> int:
    """Return the number of launches; no values are computed, so no GPU is needed."""
    with FakeTensorMode(), torch.device(device), Costs() as costs:
        rows, out = torch.empty(count, length, dtype=dtype), torch.empty(length)
        before = costs.launches
        function(rows, out)
    return costs.launches - before


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_rows_are_summed_in_fp32(count: int, dtype: torch.dtype) -> None:
    for length in (1, 50, 4097):
        rows = pieces(count, length, dtype)
        exact = rows.double().sum(0)
        error = (total(sum_rows, rows).double() - exact).norm() / rows.double().norm()
        assert error < 1e-7 * math.sqrt(count)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("count", [2, 7, 64])
def test_the_order_does_not_depend_on_threads(count: int, dtype: torch.dtype) -> None:
    rows = pieces(count, 40_003, dtype)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(total(sum_rows, rows))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(bits(found[0]), bits(other)) for other in found[1:])


def test_launches_do_not_grow_with_ranks() -> None:
    def on(device: str, function: Any, dtype: torch.dtype) -> list[int]:
        return [launches(function, n, 2 * BLOCK // n, dtype, device) for n in (2, 8, 512)]

    for dtype in (FP32, BF16, FP16):
        assert on("cuda", sum_rows, dtype) == [1, 1, 1]
    # One for each level of the tree. (Without a GPU, fake tensors cannot be sliced on "cuda".)
    assert on("cpu", sum_pairwise, FP32) == [1, 3, 9]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_cpu_adds_rows_in_rank_order(dtype: torch.dtype) -> None:
    rows = pieces(5, BLOCK + 3, dtype)
    rows[:, :7] = -0.0
    expected = rows[0].float()
    for row in rows[1:]:
        expected = expected + row
    assert torch.equal(bits(total(sum_rows, rows)), bits(expected))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 32])
def test_a_pairwise_sum_is_the_same_at_every_split(count: int) -> None:
    rows = pieces(count, 999)
    rows[:, :7] = -0.0  # zeros keep their sign, too
    expected = [*rows]
    while len(expected) > 1:
        expected = [a + b for a, b in zip(expected[::2], expected[1::2], strict=True)]
    whole = total(sum_pairwise, rows)
    assert torch.equal(bits(whole), bits(expected[0]))
    if count > 2:
        halves = torch.stack([total(sum_pairwise, half) for half in rows.chunk(2)])
        assert torch.equal(bits(total(sum_pairwise, halves)), bits(whole))
        assert not torch.equal(bits(total(sum_rows, rows)), bits(whole))


SIZES = (96, 4800, 960, 192, 1920)


def values_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size))


def reduced(
    reduction: AllToAllReduce, traffic: AllToAllTraffic | None = None, device: torch.device = CPU
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of all buckets on this rank, and the exact ones."""
    buckets = [values_of(dist.get_rank(), size).to(device) for size in SIZES]
    with traffic or AllToAllTraffic(1):
        for bucket in buckets:
            reduction.launch(bucket)
        reduction.finish()
    world_size = dist.get_world_size()
    exact = [sum(values_of(r, size).double() for r in range(world_size)) for size in SIZES]
    if not reduction.sharded:
        return buckets, exact  # type: ignore[return-value]
    return (
        [reduction.shard(bucket) for bucket in buckets],
        [values.chunk(world_size)[dist.get_rank()] for values in exact],  # type: ignore[union-attr]
    )


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return float(
        (torch.cat(found).cpu().double() - torch.cat(exact)).norm() / torch.cat(exact).norm()
    )


def on_machines(local: int, device: torch.device = CPU) -> None:
    """Check sums and bytes of every kind of exchange, with `local` ranks on each machine."""
    assert dist.group.WORLD is not None
    world, world_size = dist.group.WORLD, dist.get_world_size()
    machines = world_size // local
    pretend(local)
    groups = exchange_groups(world, device)
    assert [group.size() for group in groups] == [local, machines]
    # Values are rounded, and the sums of machines; without shards the sums, too.
    for dtype, unit in ((FP32, 5e-8), (BF16, 1.7e-3), (FP16, 2.1e-4)):
        for shard, roundings in ((True, 2), (False, 3)):
            traffic = AllToAllTraffic(local)
            options: dict[str, Any] = {"shard": shard, "comm_dtype": dtype, "pairwise": False}
            reduction = AllToAllReduce(world, **options, groups=groups)
            found, exact = reduced(reduction, traffic, device)
            assert error(found, exact) < 1.15 * unit * math.sqrt(roundings)
            nbytes = sum(SIZES) * dtype.itemsize
            assert traffic.inside == pytest.approx(nbytes * (local - 1) / local)
            assert traffic.across == pytest.approx(nbytes * (machines - 1) / machines / local)
            # A ring of all ranks, through one network card of each machine for each rank.
            ring = 4 * sum(SIZES) * (world_size - 1) / world_size / local
            if dtype != FP32:
                assert traffic.across < ring / 2
            flat = AllToAllTraffic(local)
            reduced(AllToAllReduce(world, **options), flat, device)
            assert flat.across == pytest.approx(local * traffic.across)
            assert flat.inside + flat.across == pytest.approx(traffic.inside + traffic.across)


@ranks(4)
def test_two_machines_with_two_ranks() -> None:
    on_machines(2)
    assert dist.group.WORLD is not None
    groups = exchange_groups(dist.group.WORLD, CPU)
    for shard in (True, False):
        options: dict[str, Any] = {"shard": shard, "comm_dtype": FP32, "pairwise": True}
        flat, _ = reduced(AllToAllReduce(dist.group.WORLD, **options))
        found, _ = reduced(AllToAllReduce(dist.group.WORLD, **options, groups=groups))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, flat, strict=True))


@pytest.mark.parametrize("local", [2, 3])
@ranks(6)
def test_six_ranks(local: int) -> None:
    on_machines(local)


@pytest.mark.gpu
@ranks(4, cuda=True)
def test_two_machines_with_gpus() -> None:
    on_machines(2, torch.device("cuda"))
