"""The order of samples, against a scalar implementation in Python's own integers."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.data.order import Division, MicrobatchSampler, microbatches_per_rank, sample_indices
from distmp.errors import ConfigError

M = 2**64
GOLDEN = 0x9E3779B97F4A7C15
seeds = st.integers(-(2**70), 2**70)
sizes = st.integers(1, 3000)


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % M
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % M
    return x ^ (x >> 31)


def scalar_index(seed: int, position: int, size: int) -> int:
    epoch, value = divmod(position, size)
    key = mix(mix((epoch + GOLDEN) % M) ^ (seed % M))
    half = next(h for h in range(1, 65) if 4**h >= size)
    while True:
        left, right = divmod(value, 2**half)
        for number in range(1, 11):
            left, right = right, left ^ (mix(right ^ (key + number * GOLDEN) % M) % 2**half)
        value = left * 2**half + right
        if value < size:
            return value


def test_order_agrees_with_recorded_values() -> None:
    # Runs resume from a number of samples only: another order would repeat some and skip others.
    # If this fails, the order needs a version in the checkpoint.
    assert sample_indices(0, 0, 25, 10).tolist() == (
        [8, 0, 2, 9, 7, 4, 5, 3, 6, 1, 3, 6, 2, 5, 4, 8, 0, 1, 7, 9, 2, 6, 5, 7, 1]
    )
    assert sample_indices(1, 10**12, 8, 116101).tolist() == (
        [58940, 35118, 51094, 30806, 48833, 34291, 5948, 76604]
    )
    assert sample_indices(-3, 5, 6, 7).tolist() == [3, 5, 0, 3, 4, 2]


@given(seeds, st.integers(0, 2**50), sizes)
def test_order_agrees_with_scalar_reference(seed: int, first: int, size: int) -> None:
    expected = [scalar_index(seed, first + i, size) for i in range(20)]
    assert sample_indices(seed, first, 20, size).tolist() == expected


@given(seeds, st.integers(0, 10**6), sizes)
def test_each_epoch_holds_each_sample_once(seed: int, epoch: int, size: int) -> None:
    indices = sample_indices(seed, epoch * size, size, size)
    assert sorted(indices.tolist()) == list(range(size))


def test_small_permutations_are_uniformly_distributed() -> None:
    seen = [tuple(sample_indices(seed, 0, 3, 3).tolist()) for seed in range(3000)]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6
    assert sum((count - 500) ** 2 / 500 for count in counts) < 20.5  # chi-square, p = 0.001


def test_neighboring_samples_are_separated() -> None:
    order = sample_indices(0, 0, 20_000, 20_000)
    assert abs(np.corrcoef(np.arange(20_000), order)[0, 1]) < 4 / 20_000**0.5
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / 20_000**0.5


@given(
    seed=seeds,
    size=st.integers(1, 500),
    first=st.integers(0, 10**9),
    microbatch=st.integers(1, 5),
    world_size=st.integers(1, 6),
    count=st.integers(1, 4),
    step=st.integers(0, 3),
)
def test_ranks_read_global_batch_in_order(
    seed: int, size: int, first: int, microbatch: int, world_size: int, count: int, step: int
) -> None:
    batch = microbatch * world_size * count
    read: list[int] = []
    for rank in range(world_size):
        division = Division(first, batch, microbatch, rank, world_size)
        sampler = MicrobatchSampler(division, size, seed)
        microbatches = list(islice(sampler, step * count, (step + 1) * count))
        assert [len(m) for m in microbatches] == [microbatch] * count
        places = [place for m in microbatches for place in m]
        assert [position for position, _ in places] == list(division.own(first + step * batch))
        read += [index for _, index in places]
    assert read == sample_indices(seed, first + step * batch, batch, size).tolist()


def test_microbatches_per_rank_agree_with_sizes() -> None:
    assert microbatches_per_rank(64, 8, 2) == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 8, 3), "= 8 x 3 = 24; nearest: 96 or 120"),
        ((4, 2, 4), "nearest: 8$"),
        ((4, 8, 1), "microbatch_size = 8: must be at most batch.global_batch_size = 4"),
        ((0, 8, 1), "global_batch_size = 0: must be at least 1"),
        ((8, 0, 1), "microbatch_size = 0: must be at least 1"),
    ],
)
def test_indivisible_batches_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        microbatches_per_rank(*sizes)
