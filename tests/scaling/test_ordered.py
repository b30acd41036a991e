from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.exchange import Costs
from distmp.scaling.norms import (
    CHUNK,
    DEFAULT_ELEMENTS_PER_BLOCK,
    ELEMENTS_PER_BLOCK,
    SUBTREE,
    chunk_squares,
    pairwise_sums,
)
from distmp.scaling.step_decision import GradientPart, local_stats, ordered_total
from distmp.utils.live_bytes import LiveBytes
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LEAVES = 8


def tree(values: list[float]) -> float:
    """Sum as a balanced binary tree over values and zeros at the end."""
    width = 1 << (len(values) - 1).bit_length()
    row = [*values, *[0.0] * (width - len(values))]
    while len(row) > 1:
        row = [left + right for left, right in zip(row[::2], row[1::2], strict=True)]
    return row[0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 40))
def test_pairwise_sums_are_a_tree_that_zeros_at_the_end_do_not_change(
    values: list[float], zeros: int
) -> None:
    padded = torch.tensor([*values, *[0.0] * zeros], dtype=torch.float64)
    (found,) = pairwise_sums([padded]).tolist()
    assert found == tree(values)
    assert found == pytest.approx(math.fsum(values), abs=1e-6)


def test_sums_of_different_lengths_are_computed_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 1, SUBTREE, SUBTREE + 1, 5 * SUBTREE - 2, 2)
    parts = [torch.rand(length, generator=generator, dtype=torch.float64) for length in lengths]
    assert pairwise_sums(parts).tolist() == [tree(part.tolist()) for part in parts]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 21))
def test_squares_of_chunks_at_any_size_of_blocks(chunks: list[int], block: int) -> None:
    generator = torch.Generator().manual_seed(sum(chunks))
    flat = torch.randn(sum(chunks) * CHUNK, generator=generator)
    flat *= 10 ** torch.linspace(-30, 30, len(flat))  # squares outside of the range of FP32, too
    with mock.patch.dict(ELEMENTS_PER_BLOCK, cpu=block * CHUNK):
        found = chunk_squares(flat.split([count * CHUNK for count in chunks]))
    expected = flat.double().square().view(-1, CHUNK)
    torch.testing.assert_close(found, expected.sum(1), rtol=1e-14, atol=0)
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    assert torch.equal(found, expected[:, 0])


def costs_on_a_gpu(lengths: list[int]) -> tuple[int, int]:
    """Return launches and bytes of temporary memory of `ordered_total`, without computing it."""
    with FakeTensorMode(), LiveBytes() as memory, Costs() as costs:
        shards = [torch.empty(length) for length in lengths]
        losses = [torch.ones(()) for _ in range(LEAVES)]
        memory.start()
        before = costs.launches, sum(memory.live.values())
        options = {"stop": False, "dropped": 0.0, "group": None, "device": CPU}
        with mock.patch.dict(ELEMENTS_PER_BLOCK, clear=True):
            ordered_total(shards, losses, losses, **options)
        return costs.launches - before[0], sum(memory.peak.values()) - before[1]


def test_launches_do_not_grow_with_elements_up_to_the_size_of_a_block() -> None:
    half = DEFAULT_ELEMENTS_PER_BLOCK // 2
    for shards in (1, 2, 64):
        few, many = (costs_on_a_gpu([size // shards] * shards)[0] for size in (64 * CHUNK, half))
        assert many == few
    (one, _), (eight, _) = costs_on_a_gpu([half]), costs_on_a_gpu([16 * half])
    assert eight - one <= 7 * 16 + SUBTREE.bit_length() + 1  # blocks, and a tree of subtrees


@pytest.mark.parametrize("lengths", [[3 * 2**24], [2**22] * 10], ids=["large", "small"])
def test_temporary_memory_is_bounded(lengths: list[int]) -> None:
    assert costs_on_a_gpu(lengths)[1] <= 8.1 * DEFAULT_ELEMENTS_PER_BLOCK


@pytest.mark.gpu
def test_a_gpu_computes_the_bits_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    shards = [torch.randn(count * CHUNK, generator=generator) for count in (1, 2, 3)]
    on_gpu = [shard.cuda() for shard in shards]
    with Costs() as costs:
        found = chunk_squares(on_gpu)
    assert costs.launches == 16 + 2  # a block, the buffer and the result
    assert torch.equal(found.cpu(), chunk_squares(shards))
    assert torch.equal(pairwise_sums([found]).cpu(), pairwise_sums([found.cpu()]))


SEEDS = range(12)
"""Sums in another order often have different bits, not always."""


def buckets(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(chunks * CHUNK, generator=generator) for chunks in (8, 3)]


def leaf_numbers(seed: int) -> Tensor:
    """Return loss sums and weights, FP64 of shape (2, LEAVES)."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.rand(2, LEAVES, generator=generator, dtype=torch.float64) * 7


def total_on_this_rank(seed: int, *, overflow: bool = False) -> list[float]:
    """Return the total with this rank's part; buckets are padded with zeros to divide them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    shards = []
    for bucket in buckets(seed):
        if overflow:
            bucket[CHUNK // 2] = float("inf")
        room = -(-len(bucket) // (CHUNK * world_size)) * CHUNK * world_size
        shards.append(torch.cat([bucket, torch.zeros(room - len(bucket))]).chunk(world_size)[rank])
    losses, weights = (part.chunk(world_size)[rank] for part in leaf_numbers(seed))
    return ordered_total(
        shards,
        list(losses),
        list(weights),
        stop=rank == world_size - 1,
        dropped=float(rank == 0),
        group=dist.group.WORLD if world_size > 1 else None,
        device=CPU,
    ).tolist()


def totals(block: int) -> list[list[float]]:
    with mock.patch.dict(ELEMENTS_PER_BLOCK, cpu=block):
        return [total_on_this_rank(seed) for seed in SEEDS]


def test_the_same_bits_at_every_number_of_ranks() -> None:
    alone = totals(3 * CHUNK)
    for world_size, block in ((2, CHUNK), (4, DEFAULT_ELEMENTS_PER_BLOCK)):
        assert run_ranks(totals, world_size, block) == [alone] * world_size
    for seed in SEEDS:
        losses, weights = leaf_numbers(seed)
        expected = local_stats(
            [GradientPart(buckets(seed), replicas=1)],
            [losses.sum()],
            [weights.sum()],
            stop=True,
            dropped=1.0,
            device=CPU,
        )
        assert alone[seed] == pytest.approx(expected.tolist(), rel=1e-6)


def test_overflow_is_detected() -> None:
    assert not math.isfinite(total_on_this_rank(0, overflow=True)[0])


def test_dropped_microbatches_are_no_request_to_stop() -> None:
    one = torch.ones(())
    total = ordered_total(
        [torch.ones(CHUNK)],
        [one],
        [one],
        stop=False,
        dropped=3.0,
        more=[5.0],
        group=None,
        device=CPU,
    )
    assert total[3:].tolist() == [3.0, 0.0, 5.0]
