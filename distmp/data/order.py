"""The order of samples: a pure function of the seed and the number of samples consumed.

Training reads an endless sequence of epochs, each a permutation of the data set. The permutation is
not stored. A keyed Feistel network (Luby and Rackoff, 1988) permutes a power of four that is at
least the size of the data set; positions outside the data set are permuted again until they are
inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The round
function is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). All operations are integer
arithmetic modulo 2**64, so the order is the same with every version of numpy and on every machine,
and a run resumes at any position without reading earlier samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from distmp.errors import ConfigError

# Four rounds suffice for a large data set. With few samples more are needed to make all orders
# equally likely.
_ROUNDS = 10
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_indices(seed: int, first: int, count: int, size: int) -> NDArray[np.int64]:
    """Return the indices of the samples at positions `first` to `first + count - 1` of the order.

    Args:
        seed: Any integer; another seed gives another order.
        first: Number of samples consumed before.
        count: Number of positions.
        size: Number of samples in the data set. Positions `e * size` to `(e + 1) * size - 1` are
            epoch e and contain every sample once.

    Returns:
        Indices, int64 [count], from 0 to `size - 1`.

    Raises:
        ValueError: If `size` is below 1, or `first` or `count` is negative.
    """
    if size < 1 or first < 0 or count < 0:
        raise ValueError(f"need size >= 1, first >= 0, count >= 0; got {size}, {first}, {count}")
    positions = np.arange(first, first + count, dtype=np.uint64)
    epochs, offsets = np.divmod(positions, np.uint64(size))
    keys = _mix(_mix(epochs + _GOLDEN) ^ np.uint64(seed % 2**64))
    return _permute(offsets, keys, size).astype(np.int64)


def _permute(
    offsets: NDArray[np.uint64], keys: NDArray[np.uint64], size: int
) -> NDArray[np.uint64]:
    """Permute range(size), by cycle walking; one key for each offset."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    permuted = _feistel(offsets, keys, half_bits)
    outside = np.flatnonzero(permuted >= size)
    while outside.size:
        permuted[outside] = _feistel(permuted[outside], keys[outside], half_bits)
        outside = outside[permuted[outside] >= size]
    return permuted


def _feistel(
    values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int
) -> NDArray[np.uint64]:
    """Permute range(4**half_bits)."""
    shift = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & mask
    for _ in range(_ROUNDS):
        keys = keys + _GOLDEN
        left, right = right, left ^ (_mix(right ^ keys) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every input bit over all 64 output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def microbatches_per_rank(global_batch_size: int, microbatch_size: int, world_size: int) -> int:
    """Return how many microbatches each rank computes in a step.

    Raises:
        ConfigError: If the global batch cannot be divided into the same number of full microbatches
            for each rank. The message names the nearest batch sizes that can.
    """
    for name, value in (
        ("batch.global_batch_size", global_batch_size),
        ("batch.microbatch_size", microbatch_size),
    ):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    if microbatch_size > global_batch_size:
        raise ConfigError(
            "batch.microbatch_size",
            microbatch_size,
            f"must be at most batch.global_batch_size = {global_batch_size}",
        )
    unit = microbatch_size * world_size
    count, rest = divmod(global_batch_size, unit)
    if rest:
        fitting = " or ".join(str(unit * k) for k in (count, count + 1) if k)
        raise ConfigError(
            "batch.global_batch_size",
            global_batch_size,
            f"must be a multiple of batch.microbatch_size x number of ranks = {microbatch_size} x"
            f" {world_size} = {unit}; nearest: {fitting}",
        )
    return count


class MicrobatchSampler:
    """Endless sequence of the microbatches of one rank, as lists of sample indices.

    Step t starts at position `first_sample + t * global_batch_size`. Its global batch is divided
    into contiguous microbatches, and rank r computes the r-th group of `microbatches_per_rank` of
    them. So the samples of a step and their order are the same at any world size.

    Args:
        size: Number of samples in the data set.
        seed: Seed of the order.
        first_sample: Number of samples consumed before, by all ranks together.
        global_batch_size: Samples of one step, over all ranks.
        microbatch_size: Samples of one forward and backward.
        rank: This rank.
        world_size: Number of ranks that share the batch.

    Raises:
        ConfigError: If the global batch cannot be divided (see `microbatches_per_rank`).
    """

    def __init__(
        self,
        *,
        size: int,
        seed: int,
        first_sample: int,
        global_batch_size: int,
        microbatch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.size = size
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.microbatch_size = microbatch_size
        count = microbatches_per_rank(global_batch_size, microbatch_size, world_size)
        self.samples_per_rank = count * microbatch_size
        self.first = first_sample + rank * self.samples_per_rank

    def __iter__(self) -> Iterator[list[int]]:
        """Yield an endless sequence of lists of `microbatch_size` indices."""
        first = self.first
        while True:
            indices = sample_indices(self.seed, first, self.samples_per_rank, self.size).tolist()
            for start in range(0, self.samples_per_rank, self.microbatch_size):
                yield indices[start : start + self.microbatch_size]
            first += self.global_batch_size

    def positions(self) -> Iterator[range]:
        """Yield the positions of each microbatch in the order of the data."""
        first = self.first
        while True:
            for start in range(first, first + self.samples_per_rank, self.microbatch_size):
                yield range(start, start + self.microbatch_size)
            first += self.global_batch_size
