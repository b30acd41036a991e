"""Loads the microbatches of one rank for evaluation: each sample occurs once over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from distmp.data.loading import Batch, Collate, collate_of, is_stream


@dataclass(frozen=True)
class ForwardOnly:
    """A microbatch whose forward has to run, but whose loss and metrics do not count.

    Attributes:
        batch: The microbatch, with samples that another rank counts.
    """

    batch: Any


def evaluation_batches(
    dataset: Any,
    *,
    samples: int | None,
    microbatch_size: int,
    rank: int,
    world_size: int,
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
        rank: This rank.
        world_size: Number of ranks that share the evaluation.
        collate_fn: Combines samples into a microbatch; None uses `collate_of(dataset)`.
    """
    combine = collate_fn or collate_of(dataset)
    if is_stream(dataset):
        yield from _evaluate_stream(dataset, samples, microbatch_size, rank, world_size, combine)
        return
    size = len(dataset)
    chosen = size if samples is None else min(samples, size)
    indices = (np.arange(chosen, dtype=np.int64) * size // max(chosen, 1)).tolist()
    groups = [indices[i : i + microbatch_size] for i in range(0, chosen, microbatch_size)]
    for group in groups[rank::world_size]:
        yield combine([dataset[index] for index in group])
    missing = -len(groups) % world_size
    if rank >= world_size - missing:
        # One sample is enough: only the forward has to happen.
        yield ForwardOnly(combine([dataset[groups[0][0]]]))


def _evaluate_stream(
    dataset: Any,
    samples: int | None,
    microbatch_size: int,
    rank: int,
    world_size: int,
    combine: Collate,
) -> Iterator[Batch | ForwardOnly]:
    """Yield every `world_size`-th microbatch; every rank reads the whole stream."""
    stream = islice(dataset, samples)
    own: list[Any] = []
    for number in itertools.count():
        group = list(islice(stream, microbatch_size))
        if not number:
            first = group[:1]
        if not group:
            break
        if number % world_size == rank:
            own = group
        if number % world_size == world_size - 1:
            yield combine(own)
            own = []
    if number % world_size:  # the other ranks have one more microbatch
        yield combine(own) if own else ForwardOnly(combine(first))
