"""Loads the microbatches of one rank: endless for training, finite for evaluation."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from distmp.data import IGNORED
from distmp.data.order import MicrobatchSampler, microbatches_per_rank
from distmp.data.seeded import SeededSamples
from distmp.distributed.stopping import STOP_SIGNALS
from distmp.errors import ConfigError
from distmp.utils.parent_process import signal_when_parent_ends

Batch = dict[str, Tensor]


def step_batches(
    dataset: Any,
    *,
    seed: int,
    first_sample: int,
    global_batch_size: int,
    microbatch_size: int,
    rank: int,
    world_size: int,
    workers: int = 0,
    pin_memory: bool = False,
) -> Generator[list[Batch], None, None]:
    """Return an endless generator of the microbatches of this rank, one list per step.

    Args:
        dataset: Map-style dataset. It may draw random numbers (see `distmp.data.seeded`); an
            attribute `draws_nothing = True` disables the seeding, which takes time. See
            `collate_of` for its attribute `collate_fn`.
        seed: Seed of the order (see `distmp.data.order`).
        first_sample: Number of samples that all ranks together have consumed before.
        global_batch_size: Samples of one step, over all ranks.
        microbatch_size: Samples of one forward and backward.
        rank: This rank.
        world_size: Number of ranks that share the batch.
        workers: Processes that prepare microbatches; 0 prepares them in this process.
        pin_memory: Whether tensors are in page-locked memory, for faster copies to a GPU.

    Returns:
        A generator. Its workers end when it is closed or deleted.

    Raises:
        ConfigError: Immediately, if the global batch cannot be divided over the ranks.
    """
    count = microbatches_per_rank(global_batch_size, microbatch_size, world_size)
    sampler = MicrobatchSampler(
        size=len(dataset),
        seed=seed,
        first_sample=first_sample,
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        rank=rank,
        world_size=world_size,
    )
    places: Any = sampler
    collate = collate_of(dataset)
    if not getattr(dataset, "draws_nothing", False):
        dataset, places = SeededSamples(dataset, seed), _Places(sampler)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=places,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_stop_signals,
        # Without a separate generator, the loader would draw from the one that dropout uses.
        generator=torch.Generator().manual_seed(seed % 2**63),
    )
    return _group(loader, count)


def collate_of(dataset: Any) -> Callable[[list[Any]], Any]:
    """Return the function that makes a microbatch of samples.

    It is the attribute `collate_fn` of the dataset, or of the dataset that is split into
    `torch.utils.data.Subset`s; without one, torch's `default_collate`.

    Raises:
        ConfigError: If the attribute cannot be called.
    """
    while not hasattr(dataset, "collate_fn") and isinstance(dataset, Subset):
        dataset = dataset.dataset
    collate = getattr(dataset, "collate_fn", None)
    if collate is None:
        return default_collate
    if not callable(collate):
        raise ConfigError(
            "data.source",
            type(dataset).__name__,
            f"its attribute collate_fn is a {type(collate).__name__}; make it a function that "
            "takes a list of samples and returns a microbatch",
        )
    function: Callable[[list[Any]], Any] = collate
    return function


class _Places:
    """The (position, index) of the samples of each microbatch."""

    def __init__(self, sampler: MicrobatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices, positions in zip(self._sampler, self._sampler.positions(), strict=False):
            yield list(zip(positions, indices, strict=True))


def _group(loader: DataLoader[Any], count: int) -> Generator[list[Batch], None, None]:
    """Yield `count` microbatches at a time."""
    microbatches = iter(loader)
    try:
        while True:
            yield [next(microbatches) for _ in range(count)]
    finally:
        # A deleted iterator ends its workers, but a traceback can keep it alive. An iterator
        # without workers has no such method.
        end_workers = getattr(microbatches, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()


def _ignore_stop_signals(worker: int) -> None:
    """Ignore stop signals in a worker: the training process ends its step and closes the loader.

    Ctrl-C and the signals of a scheduler reach every process of a group. A worker that ended first
    would turn an orderly stop into a crash. The kernel kills the worker when the training process
    dies, also while it reads a sample.
    """
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal_when_parent_ends()


def evaluation_batches(
    dataset: Any,
    *,
    samples: int | None,
    microbatch_size: int,
    rank: int,
    world_size: int,
) -> Iterator[Batch]:
    """Return the microbatches of this rank in an evaluation.

    Every chosen sample occurs exactly once over all ranks, at any world size, and the choice is
    always the same. All ranks get the same number of microbatches, because the forward of a sharded
    model is collective. If the microbatches do not divide over the ranks, the last ranks get one
    more whose targets are all IGNORED. Its loss sum and its weight are zero, so it does not change
    sums over ranks.

    This works for a dataset of dicts with integer "targets" and a loss that skips IGNORED. Any
    other dataset needs a method `ignored(batch) -> batch` that turns a collated microbatch into one
    for which the run's loss function returns a sum and a weight of zero.

    Args:
        dataset: Map-style dataset.
        samples: Number of samples, spread evenly over the dataset; None for all.
        microbatch_size: Samples of one forward; the last microbatch may have fewer.
        rank: This rank.
        world_size: Number of ranks that share the evaluation.

    Returns:
        A finite iterator of collated microbatches.

    Raises:
        ConfigError: Immediately and on every rank, if a microbatch must be ignored and the dataset
            does not support it.
    """
    size = len(dataset)
    chosen = size if samples is None else min(samples, size)
    indices = (np.arange(chosen, dtype=np.int64) * size // max(chosen, 1)).tolist()
    groups = [indices[i : i + microbatch_size] for i in range(0, chosen, microbatch_size)]
    missing = -len(groups) % world_size
    if missing:
        ignore_targets(dataset, collate_of(dataset)([dataset[groups[0][0]]]))
    return _evaluate(dataset, groups, missing, rank, world_size)


def _evaluate(
    dataset: Any, groups: list[list[int]], missing: int, rank: int, world_size: int
) -> Iterator[Batch]:
    collate = collate_of(dataset)
    for group in groups[rank::world_size]:
        yield collate([dataset[index] for index in group])
    if missing and rank >= world_size - missing:
        # One sample is enough: only the forward has to happen.
        yield ignore_targets(dataset, collate_of(dataset)([dataset[groups[0][0]]]))


def ignore_targets(dataset: Any, batch: Any) -> Any:
    """Return a microbatch of the same shape whose loss and weight are zero.

    Raises:
        ConfigError: If the dataset has no method `ignored` and its samples no integer "targets".
    """
    if hasattr(dataset, "ignored"):
        return dataset.ignored(batch)
    targets = batch.get("targets") if isinstance(batch, dict) else None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        raise ConfigError(
            "data.source",
            type(dataset).__name__,
            "its samples do not divide over the ranks in evaluation and have no integer 'targets'"
            " that could be ignored; give the dataset a method ignored(batch), whose result has"
            " loss and weight zero, or evaluate a number of samples that divides",
        )
    return {**batch, "targets": torch.full_like(targets, IGNORED)}
