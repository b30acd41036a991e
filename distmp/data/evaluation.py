"""Loads the microbatches of one rank for evaluation: each sample occurs once over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from distmp.data.loading import (
    Batch,
    Collate,
    SeededMicrobatches,
    check_same_source,
    collate_of,
    is_stream,
)
from distmp.data.streams import sample_checksum
from distmp.distributed.world import World
from distmp.utils.generators import generators_kept, seed_generators


@dataclass(frozen=True)
class ForwardOnly:
    """A microbatch whose forward has to run, but whose loss and metrics do not count.

    Attributes:
        batch: The microbatch, with samples that another rank counts.
    """

    batch: Any


def evaluation_batches(
    dataset: Any,
    samples: int | None,
    microbatch_size: int,
    world: World,
    collate_fn: Collate | None = None,
) -> Iterator[Batch | ForwardOnly]:
    """Yield the microbatches of this rank in an evaluation.

    Every chosen sample occurs exactly once over all ranks, at any world size, and the choice is
    always the same. All ranks get the same number of microbatches, because the forward of a sharded
    model is collective: if the microbatches do not divide over the ranks, the last ranks get one
    more, as `ForwardOnly`.

    Args:
        dataset: Map-style dataset, or an iterable one that ends.
        samples: Number of samples, spread evenly over the dataset; an iterable dataset gives its
            first samples. None for all.
        microbatch_size: Samples of one forward; the last microbatch may have fewer.
        world: The ranks that share the evaluation.
        collate_fn: Combines samples into a microbatch; None uses `collate_of(dataset)`.
    """
    combine = collate_fn or collate_of(dataset)
    if is_stream(dataset):  # every rank reads the whole stream
        groups = _grouped(islice(enumerate(_seeded(dataset)), samples), microbatch_size)

        def read(group: list[tuple[int, Any]]) -> Any:
            with generators_kept():
                seed_generators(f"microbatch 0 {group[0][0]}")
                return combine([sample for _, sample in group])

        yield from _own(groups, world, read, compared=True)
        return
    size = len(dataset)
    chosen = size if samples is None else min(samples, size)
    indices = (np.arange(chosen, dtype=np.int64) * size // max(chosen, 1)).tolist()
    # What the dataset draws depends on the sample alone.
    seeded = SeededMicrobatches(dataset, 0, combine, collate_draws=collate_fn is not None)
    groups = _grouped(zip(indices, indices, strict=True), microbatch_size)
    yield from _own(groups, world, seeded.__getitems__)


def _seeded(dataset: Any) -> Iterator[Any]:
    """Yield the samples of a stream; what it draws depends on their position alone."""
    with generators_kept():
        seed_generators("pass 0 0")
        stream = iter(dataset)
    for position in count():
        with generators_kept():
            seed_generators(f"sample 0 {position}")
            sample = [*islice(stream, 1)]
        if not sample:
            return
        yield sample[0]


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` items; the last one may be shorter."""
    while group := list(islice(items, size)):
        yield group


def _own(
    groups: Iterator[list[Any]], world: World, read: Collate, *, compared: bool = False
) -> Iterator[Batch | ForwardOnly]:
    """Yield the microbatches of this rank, each read from its group of samples or indices.

    Args:
        groups: The groups of all ranks, one after the other.
        world: The ranks.
        read: Makes a microbatch of a group.
        compared: Whether ranks compare the first samples, and the number of samples up to each
            microbatch and at the end: different streams would leave out samples, or count them
            twice.
    """
    samples = first = 0
    while True:
        # One sample is enough where only the forward has to happen.
        taken: list[list[Any]] = []
        for _, group in zip(range(world.world_size), groups, strict=False):
            samples += len(group)
            taken.append(group if len(taken) == world.rank else group[:1])
        if compared and world.group is not None:
            first = first or sample_checksum([group[0] for group in taken])
            described = f"{samples:,} samples of a stream, checksum {first:08x} of the first ones"
            check_same_source(world, "dataset", described)
        if not taken:
            return
        yield read(taken[world.rank]) if world.rank < len(taken) else ForwardOnly(read(taken[0]))
