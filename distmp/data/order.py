"""The order of samples: a pure function of the seed and the number of samples consumed.

Training reads an endless sequence of epochs, each a permutation of the dataset. The permutation is
not stored. A keyed Feistel network (Luby and Rackoff, 1988) permutes a power of four that is at
least the size of the dataset; positions outside the dataset are permuted again until they are
inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The round
function is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). All operations are integer
arithmetic modulo 2**64, so the order is the same with every version of numpy and on every machine,
and a run resumes at any position without reading earlier samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distmp.errors import require

# Four rounds suffice for a large dataset. With few samples more are needed to make all orders
# equally likely.
_ROUNDS = 10
_Numbers = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_indices(seed: int, first: int, count: int, size: int) -> NDArray[np.int64]:
    """Return the indices of the samples at positions `first` to `first + count - 1` of the order.

    Args:
        seed: Any integer; another seed gives another order.
        first: Number of samples consumed before.
        count: Number of positions.
        size: Number of samples in the dataset. Positions `e * size` to `(e + 1) * size - 1` are
            epoch e and contain every sample once.

    Returns:
        Indices, int64 [count], from 0 to `size - 1`.

    Example:
        >>> sorted(sample_indices(0, first=4, count=4, size=4).tolist())
        [0, 1, 2, 3]
    """
    positions = np.arange(first, first + count, dtype=np.uint64)
    epochs, offsets = np.divmod(positions, np.uint64(size))
    keys = _mix(_mix(epochs + _GOLDEN) ^ np.uint64(seed % 2**64))
    return _permute(offsets, keys, size).astype(np.int64)


def _permute(offsets: _Numbers, keys: _Numbers, size: int) -> _Numbers:
    """Permute range(size), by cycle walking; one key for each offset."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    permuted = _feistel(offsets, keys, half_bits)
    outside = np.flatnonzero(permuted >= size)
    while outside.size:
        permuted[outside] = _feistel(permuted[outside], keys[outside], half_bits)
        outside = outside[permuted[outside] >= size]
    return permuted


def _feistel(values: _Numbers, keys: _Numbers, half_bits: int) -> _Numbers:
    """Permute range(4**half_bits)."""
    shift = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & mask
    for _ in range(_ROUNDS):
        keys = keys + _GOLDEN
        left, right = right, left ^ (_mix(right ^ keys) & mask)
    return (left << shift) | right


def _mix(values: _Numbers) -> _Numbers:
    """Spread every input bit over all 64 output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def microbatches_per_rank(
    global_batch_size: int,
    microbatch_size: int,
    world_size: int,
    names: tuple[str, str] = ("batch.global_batch_size", "batch.microbatch_size"),
) -> int:
    """Return how many microbatches each rank computes in a step.

    Args:
        global_batch_size: Samples of one step, over all ranks.
        microbatch_size: Samples of one forward and backward.
        world_size: Number of ranks that share the batch.
        names: Names of the two sizes in messages.

    Raises:
        ConfigError: If the global batch cannot be divided into the same number of full microbatches
            for each rank. The message names the nearest batch sizes that can.
    """
    batch, microbatch = names
    for name, value in ((batch, global_batch_size), (microbatch, microbatch_size)):
        require(value >= 1, name, value, "must be at least 1")
    problem = f"must be at most {batch} = {global_batch_size}"
    require(microbatch_size <= global_batch_size, microbatch, microbatch_size, problem)
    unit = microbatch_size * world_size
    count, rest = divmod(global_batch_size, unit)
    fitting = " or ".join(str(unit * k) for k in (count, count + 1) if k)
    problem = (
        f"must be a multiple of {microbatch} x number of ranks = {microbatch_size} x {world_size} ="
        f" {unit}; nearest: {fitting}"
    )
    require(rest == 0, batch, global_batch_size, problem)
    return count


@dataclass(frozen=True)
class Division:
    """How the samples of each step are divided over ranks and microbatches.

    Step t starts at position `first_sample + t * global_batch_size`. Its global batch is divided
    into contiguous microbatches, and rank r computes the r-th group of `microbatches` of them. So
    the samples of a step and their order are the same at any world size.

    Attributes:
        first_sample: Number of samples consumed before, by all ranks together.
        global_batch_size: Samples of one step, over all ranks.
        microbatch_size: Samples of one forward and backward.
        rank: This rank.
        world_size: Number of ranks that share the batch. It divides the global batch into full
            microbatches, see `microbatches_per_rank`.
    """

    first_sample: int
    global_batch_size: int
    microbatch_size: int
    rank: int
    world_size: int

    @property
    def microbatches(self) -> int:
        """Number of microbatches of each rank in a step."""
        return self.global_batch_size // (self.microbatch_size * self.world_size)

    def steps(self) -> Iterator[int]:
        """Yield the position of the first sample of each step, without end."""
        return itertools.count(self.first_sample, self.global_batch_size)

    def own(self, first: int) -> range:
        """Return the positions of this rank in the step that starts at position `first`."""
        share = self.global_batch_size // self.world_size
        return range(first + self.rank * share, first + (self.rank + 1) * share)


class MicrobatchSampler:
    """Endless sequence of the microbatches of one rank: lists of positions and sample indices.

    Args:
        division: How samples are divided over steps, ranks and microbatches.
        size: Number of samples in the dataset.
        seed: Seed of the order.
        shuffle: False reads the samples in the order of their indices.
    """

    def __init__(self, division: Division, size: int, seed: int, *, shuffle: bool = True) -> None:
        self.division = division
        self.size = size
        self.seed = seed
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield an endless sequence of lists of `microbatch_size` pairs (position, index)."""
        length = self.division.microbatch_size
        for first in self.division.steps():
            own = self.division.own(first)
            places = [*zip(own, self.indices(own), strict=True)]
            for start in range(0, len(own), length):
                yield places[start : start + length]

    def indices(self, positions: range) -> list[int]:
        """Return the index of the sample at each position."""
        if not self.shuffle:
            return [position % self.size for position in positions]
        return sample_indices(self.seed, positions.start, len(positions), self.size).tolist()
