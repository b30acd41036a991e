from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distmp.scaling import GradientPart, local_stats, ordered_total
from distmp.scaling.norms import CHUNK
from distmp.scaling.ordered import chunk_squares, pairwise_sum
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LEAVES = 8


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 40))
def test_pairwise_sums_are_a_tree_that_zeros_at_the_end_do_not_change(
    values: list[float], zeros: int
) -> None:
    def tree(part: list[float]) -> float:
        half = len(part) // 2
        return part[0] if half == 0 else tree(part[:half]) + tree(part[half:])

    width = 1 << (len(values) - 1).bit_length()
    expected = tree([*values, *[0.0] * (width - len(values))])
    padded = torch.tensor([*values, *[0.0] * zeros], dtype=torch.float64)
    assert pairwise_sum(padded).item() == expected
    assert pairwise_sum(padded).item() == pytest.approx(math.fsum(values), abs=1e-6)


def test_squares_of_chunks() -> None:
    flat = torch.randn(5 * CHUNK, generator=torch.Generator().manual_seed(0))
    found = chunk_squares(flat)
    expected = flat.double().square().view(5, CHUNK).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    # Each chunk by itself, independent of the others.
    assert torch.equal(found, torch.cat([chunk_squares(one) for one in flat.split(CHUNK)]))


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


def totals() -> list[list[float]]:
    return [total_on_this_rank(seed) for seed in SEEDS]


def test_the_same_bits_at_every_number_of_ranks() -> None:
    alone = totals()
    for world_size in (2, 4):
        assert run_ranks(totals, world_size) == [alone] * world_size
    for seed in SEEDS:
        losses, weights = leaf_numbers(seed)
        expected = local_stats(
            [GradientPart(buckets(seed), replicas=1)],
            losses.sum(),
            weights.sum(),
            stop=True,
            dropped=1.0,
            device=CPU,
        )
        assert alone[seed] == pytest.approx(expected.tolist(), rel=1e-6)


def test_an_overflow_shows() -> None:
    assert total_on_this_rank(0, overflow=True)[1] > 0
