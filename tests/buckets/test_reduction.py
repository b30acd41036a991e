from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distmp.buckets.reduction import AllReduce, AllToAllReduce, Reduction
from distmp.distributed import wait_times
from distmp.distributed.wait_times import collective_waits
from tests.buckets.test_gradients import group, relative_error
from tests.ranks import ranks

SIZES = (64, 4096, 1024)
COMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values_of(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randn(size, generator=generator)


def reduced(reduction: Reduction) -> list[Tensor]:
    buckets = [values_of(dist.get_rank(), size) for size in SIZES]
    for bucket in buckets:
        reduction.launch(bucket)
    reduction.finish()
    return [reduction.shard(bucket) if reduction.sharded else bucket for bucket in buckets]


def exact(size: int, *, sharded: bool) -> Tensor:
    total = sum(values_of(rank, size).double() for rank in range(dist.get_world_size()))
    assert isinstance(total, Tensor)
    return total.chunk(dist.get_world_size())[dist.get_rank()] if sharded else total


def all_kinds(*, sharded: bool) -> list[tuple[Reduction, float]]:
    """Return every reduction with its largest allowed relative error."""
    exchanges = [
        (dtype, pairwise, error)
        for dtype, error in zip(COMM_DTYPES, (1e-7, 4e-3, 5e-4), strict=True)
        for pairwise in (False, True)
    ]
    return [
        (AllReduce(group(), shard=sharded), 1e-7),
        *(
            (AllToAllReduce(group(), shard=sharded, comm_dtype=dtype, pairwise=pairwise), error)
            for dtype, pairwise, error in exchanges
        ),
    ]


def check_all_kinds() -> None:
    for sharded in (False, True):
        for reduction, tolerance in all_kinds(sharded=sharded):
            found = reduced(reduction)
            for size, total in zip(SIZES, found, strict=True):
                assert relative_error(total, exact(size, sharded=sharded)) < tolerance
            again = reduced(reduction)
            assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
            if not sharded:
                everyone = [torch.empty_like(found[1]) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, found[1])
                assert all(torch.equal(one, found[1]) for one in everyone)


@ranks(2)
def test_every_kind_on_two_ranks() -> None:
    check_all_kinds()


@ranks(4)
def test_every_kind_on_four_ranks() -> None:
    check_all_kinds()
    bucket = values_of(dist.get_rank(), 4096)
    expected = exact(4096, sharded=False)
    ring = bucket.bfloat16()
    dist.all_reduce(ring)
    exchange = AllToAllReduce(group(), shard=True, comm_dtype=torch.bfloat16, pairwise=False)
    exchange.launch(bucket)
    exchange.finish()
    once = relative_error(exchange.shard(bucket), exact(4096, sharded=True))
    # Values are rounded once, not at every hop.
    assert once < 0.8 * relative_error(ring, expected)


@ranks(4)
def test_sums_in_order_and_pairwise() -> None:
    # In order, (1 + 2^-24) + 2^-24 is 1 in FP32. Pairwise, 2^-24 + 2^-24 is added first.
    tiny = 2.0**-24
    values = torch.full((64,), [1.0, tiny, tiny, tiny][dist.get_rank()])
    found = []
    for pairwise in (False, True):
        bucket = values.clone()
        exchange = AllToAllReduce(group(), shard=False, comm_dtype=torch.float32, pairwise=pairwise)
        exchange.launch(bucket)
        exchange.finish()
        found.append(bucket[0].item())
    assert found == [1.0, 1.0 + 2 * tiny]


class OnCuda(Tensor):
    """A host tensor whose device is reported as CUDA."""

    device = torch.device("cuda", 0)


class Streams:
    """Replaces CUDA streams; a time point is the stream that it is recorded on."""

    def __init__(self) -> None:
        self.compute = mock.Mock(name="compute")
        self.current = self.compute

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        former, self.current = self.current, stream
        yield
        self.current = former

    def current_of(self, device: torch.device) -> Any:
        return self.current

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with (
            mock.patch.object(torch.cuda, "Stream"),
            mock.patch.object(torch.cuda, "stream", self.entered),
            mock.patch.object(torch.cuda, "current_stream", self.current_of),
            mock.patch.object(wait_times, "TimePoint", self.current_of),
            mock.patch.object(collective_waits, "active", True),
        ):
            yield


@pytest.mark.parametrize("sharded", [False, True])
@ranks(1)
def test_waits_of_the_side_stream_are_not_counted(sharded: bool) -> None:
    """They overlap with backward; only the wait of the computing stream in `finish` delays it."""
    streams = Streams()
    reduction = AllToAllReduce(group(), shard=sharded, comm_dtype=torch.bfloat16, pairwise=False)
    with streams.installed():
        for size in SIZES:
            reduction.launch(values_of(0, size).as_subclass(OnCuda))
        reduction.finish()
        assert collective_waits.active
    assert collective_waits.take() == [(streams.compute, streams.compute)]


@pytest.mark.gpu
@ranks(2, cuda=True)
def test_every_kind_on_two_ranks_with_gpus() -> None:
    for sharded in (False, True):
        for reduction, tolerance in all_kinds(sharded=sharded):
            buckets = [values_of(dist.get_rank(), size).cuda() for size in SIZES]
            for bucket in buckets:
                reduction.launch(bucket)
            reduction.finish()
            for size, bucket in zip(SIZES, buckets, strict=True):
                total = reduction.shard(bucket) if sharded else bucket
                assert relative_error(total.cpu(), exact(size, sharded=sharded)) < tolerance
