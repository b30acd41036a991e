"""Loads the microbatches of one rank for evaluation: each sample occurs once over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distmp.data import IGNORED
from distmp.data.collation import collate_of
from distmp.data.loading import Batch, Collate, is_stream
from distmp.errors import ConfigError


def evaluation_batches(
    dataset: Any,
    *,
    samples: int | None,
    microbatch_size: int,
    rank: int,
    world_size: int,
    collate_fn: Collate | None = None,
) -> Iterator[Batch]:
    """Return the microbatches of this rank in an evaluation.

    Every chosen sample occurs exactly once over all ranks, at any world size, and the choice is
    always the same. All ranks get the same number of microbatches, because the forward of a sharded
    model is collective. If the microbatches do not divide over the ranks, the last ranks get one
    more whose targets are all IGNORED. Its loss sum and its weight are zero, so it does not change
    sums over ranks.

    This works for a dataset of dicts with integer "targets", or with the "input_ids" of Hugging
    Face, and a loss that skips IGNORED. Any other dataset needs a method
    `ignored(batch) -> batch` that turns a collated microbatch into one for which the run's loss
    function returns a sum and a weight of zero.

    Args:
        dataset: Map-style dataset, or an iterable one that ends.
        samples: Number of samples, spread evenly over the dataset; of an iterable one, the first
            ones. None for all.
        microbatch_size: Samples of one forward; the last microbatch may have fewer.
        rank: This rank.
        world_size: Number of ranks that share the evaluation.
        collate_fn: Combines samples into a microbatch; None uses `collate_of(dataset)`.

    Returns:
        A finite iterator of collated microbatches.

    Raises:
        ConfigError: On every rank, if a microbatch must be ignored and the dataset does not support
            it: immediately, or at the end of an iterable dataset.
    """
    combine = collate_fn or collate_of(dataset)
    if is_stream(dataset):
        return _evaluate_stream(dataset, samples, microbatch_size, rank, world_size, combine)
    size = len(dataset)
    chosen = size if samples is None else min(samples, size)
    indices = (np.arange(chosen, dtype=np.int64) * size // max(chosen, 1)).tolist()
    groups = [indices[i : i + microbatch_size] for i in range(0, chosen, microbatch_size)]
    missing = -len(groups) % world_size
    if missing:
        ignore_targets(dataset, combine([dataset[groups[0][0]]]))
    return _evaluate(dataset, groups, missing, rank, world_size, combine)


def _evaluate(
    dataset: Any,
    groups: list[list[int]],
    missing: int,
    rank: int,
    world_size: int,
    combine: Collate,
) -> Iterator[Batch]:
    for group in groups[rank::world_size]:
        yield combine([dataset[index] for index in group])
    if missing and rank >= world_size - missing:
        # One sample is enough: only the forward has to happen.
        yield ignore_targets(dataset, combine([dataset[groups[0][0]]]))


def _evaluate_stream(
    dataset: Any,
    samples: int | None,
    microbatch_size: int,
    rank: int,
    world_size: int,
    combine: Collate,
) -> Iterator[Batch]:
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
        yield combine(own) if own else ignore_targets(dataset, combine(first))


def ignore_targets(dataset: Any, batch: Any) -> Any:
    """Return a microbatch of the same shape whose loss and weight are zero.

    Raises:
        ConfigError: If the dataset has no method `ignored` and its samples no integer "targets".
    """
    if hasattr(dataset, "ignored"):
        return dataset.ignored(batch)
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return {**batch, "labels": torch.full_like(batch["input_ids"], IGNORED)}
    targets = batch.get("targets") if isinstance(batch, Mapping) else None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        raise ConfigError(
            "data.source",
            type(dataset).__name__,
            "its samples do not divide over the ranks in evaluation and have no integer 'targets'"
            " that could be ignored; give the dataset a method ignored(batch), whose result has"
            " loss and weight zero, or evaluate a number of samples that divides",
        )
    return {**batch, "targets": torch.full_like(targets, IGNORED)}
