"""Microbatches for a training loop that calls `Engine.step` itself."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NoReturn

from distmp.data.datasets import check_dataset
from distmp.data.evaluation import evaluation_batches
from distmp.data.loading import Collate, check_same_data, is_stream, steps
from distmp.data.order import Division, microbatches_per_rank
from distmp.data.streams import Step, length_of
from distmp.distributed.roll_call import RollCall
from distmp.distributed.world import world_of_process
from distmp.errors import ConfigError, brief, require

# The loaders of this process, of which `step_of` finds the one that has yielded a list.
_loaders: weakref.WeakSet[DataLoader] = weakref.WeakSet()

# What to do in place of arguments of torch's loader.
_INSTEAD_OF = {
    "drop_last": "remove it; each step has batch_size samples",
    "num_workers": "use workers",
    "pin_memory": "remove it; on GPUs, memory is pinned",
    "sampler": "remove it; the loader divides the samples over ranks",
}


class DataLoader:
    """Yields the microbatches of this rank, one list per step.

    `batch_size` samples form a step, over all ranks. Which samples these are depends on the seed
    and the number of samples consumed, and not on the number of ranks. So a loop can continue at
    any number of ranks without losing or repeating a sample.

    Iterating runs to the end of the current epoch. All steps have `batch_size` samples: the step
    that crosses the end of an epoch is the last of that epoch and begins with the samples that are
    left, and the next epoch continues after this step. Every rank has to iterate.

    Args:
        dataset: A map-style dataset (`__len__` and `__getitem__`), such as those of torch and
            Hugging Face, or an iterable one. Every rank passes the same dataset, of which up to 16
            samples are compared between ranks in each epoch; of an iterable one, every rank reads
            all samples and keeps its share.
        batch_size: Samples of one step, over all ranks.
        microbatch_size: Samples of one forward and backward on one rank. None makes one microbatch
            per rank and step, of `batch_size / ranks` samples.
        collate_fn: Combines a list of samples into a microbatch; None stacks tensors, numbers and
            lists of numbers like torch's `default_collate`.
        workers: Processes of this rank that prepare microbatches; 0 prepares them in this process.
            An iterable dataset takes at most 1.
        seed: Seed of the order, and of the random numbers that the dataset or `collate_fn` draws
            from the generators of torch, numpy and Python.
        shuffle: None shuffles a map-style dataset, in another order in each epoch. An iterable one
            keeps its order.
        first_sample: Number of samples consumed before, by all ranks together.

    If torchrun has started several processes and the default process group does not exist, it is
    initialized, see `init`.

    Attributes cannot be assigned, because a running iteration would not use the new values.

    Raises:
        ConfigError: If the batch cannot be divided, `dataset` is not a dataset, or an attribute is
            assigned.

    Example:
        >>> loader = DataLoader(list(range(10)), batch_size=4, microbatch_size=2, shuffle=False)
        >>> [[microbatch.tolist() for microbatch in microbatches] for microbatches in loader]
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [0, 1]]]
        >>> loader.state_dict()["samples"], len(loader)
        (12, 2)
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        microbatch_size: int | None = None,
        *,
        collate_fn: Collate | None = None,
        workers: int = 0,
        seed: int = 0,
        shuffle: bool | None = None,
        first_sample: int = 0,
        **unknown: NoReturn,
    ) -> None:
        for name in unknown:
            advice = _INSTEAD_OF.get(name, "see help(distmp.DataLoader)")
            raise TypeError(f"DataLoader() got an unexpected keyword argument {name!r}: {advice}")
        check_dataset(dataset, workers)
        self._world = world_of_process()
        _check_count("batch_size", batch_size)
        if microbatch_size is None:
            ranks = self._world.world_size
            problem = f"must be a multiple of the number of ranks, {ranks}"
            require(batch_size % ranks == 0, "batch_size", batch_size, problem)
            microbatch_size = batch_size // ranks
        _check_count("microbatch_size", microbatch_size)
        _check_count("workers", workers)
        _check_count("first_sample", first_sample)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ConfigError("seed", seed, "must be an integer, the same on every rank")
        names = ("batch_size", "microbatch_size")
        microbatches_per_rank(batch_size, microbatch_size, self._world.world_size, names)
        self.dataset = dataset
        self.batch_size = batch_size
        self.microbatch_size = microbatch_size
        self.collate_fn = collate_fn
        self.workers = workers
        self.seed = seed
        self.shuffle = not is_stream(dataset) if shuffle is None else shuffle
        self._samples = first_sample
        self._size = length_of(dataset)
        self._epoch = 0  # of a dataset without a length
        self._begun_at: int | None = None
        # The list that was yielded last, and the number of lists so far in this process.
        self._latest: list[Any] | None = None
        self._yielded = 0
        # Whether `once` has compared the dataset between ranks.
        self._is_compared = False
        self._steps: Generator[Step, None, None] | None = None
        self._check_combinations()
        self._is_built = True
        _loaders.add(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse assignments, which a running iteration would ignore."""
        problem = (
            "cannot be assigned; continue at a position with load_state_dict, and change settings "
            "with another DataLoader(..., first_sample=loader.samples)"
        )
        require(name.startswith("_") or "_is_built" not in vars(self), name, brief(value), problem)
        super().__setattr__(name, value)

    def _check_combinations(self) -> None:
        problem = (
            "an iterable dataset is read in its own order; shuffle it itself, for example by "
            "dataset.shuffle(seed=0, buffer_size=1000) of Hugging Face"
        )
        require(not (self.shuffle and is_stream(self.dataset)), "shuffle", True, problem)
        if self._size is not None:
            problem = f"is more than the {self._size:,} samples of an epoch; use a smaller batch"
            require(self.batch_size <= self._size, "batch_size", self.batch_size, problem)

    @property
    def samples(self) -> int:
        """Number of samples that were handed out, by all ranks together."""
        return self._samples

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0.

        If the dataset has no length, it is known after the first step or after `load_state_dict`.
        """
        return self._epoch if self._size is None else self.samples // self._size

    def __len__(self) -> int:
        """Return the number of steps of the current iteration; before one, of the next.

        Raises:
            TypeError: If the dataset has no length, as Python requires.
        """
        if self._size is None:
            raise TypeError(f"a {type(self.dataset).__name__} has no length")
        first = self.samples if self._begun_at is None else self._begun_at
        return -(-((first // self._size + 1) * self._size - first) // self.batch_size)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the microbatches of this rank, step by step, to the end of the current epoch.

        Raises:
            TrainingError: If another rank iterates from another position, or not at all.
        """
        # A rank that reads a step alone would train on other samples from then on.
        begin = f"an iteration of a DataLoader from sample {self.samples:,}"
        RollCall(self._world).wait_for_all(begin)
        self._begun_at = begun_at = self.samples
        first: int | None = None
        try:
            while True:
                step = self._next_step()
                first = step.epoch if first is None else first
                self._samples += self.batch_size
                self._epoch = step.next_epoch
                self._latest, self._yielded = step.microbatches, self._yielded + 1
                yield step.microbatches
                if step.next_epoch > first:
                    return
        finally:
            if self._begun_at == begun_at:
                self._begun_at = self._latest = None

    def _next_step(self) -> Step:
        if self._steps is None:
            rank, world_size = self._world.rank, self._world.world_size
            self._steps = steps(
                self.dataset,
                Division(self.samples, self.batch_size, self.microbatch_size, rank, world_size),
                self._world,
                seed=self.seed,
                shuffle=self.shuffle,
                workers=self.workers,
                collate_fn=self.collate_fn,
                setting="dataset",
            )
        try:
            return next(self._steps)
        except BaseException:
            self._steps = None  # the generator ended with the error
            raise

    def once(self) -> Iterator[Any]:
        """Yield microbatches in which each sample occurs exactly once over all ranks.

        This is for `Engine.evaluate` and `Engine.evaluate_metrics`; it does not change the
        position. Every rank has to call it. All ranks get the same number of microbatches. If the
        last ones are missing on some ranks, these get one as `ForwardOnly`, which the engine does
        not count.

        Raises:
            ConfigError: If ranks have different map-style datasets, or, while they iterate, streams
                of different lengths.
        """
        if self._world.group is not None:
            RollCall(self._world).wait_for_all("DataLoader.once()")
            if not self._is_compared:
                check_same_data(self.dataset, self.batch_size, self._world, "dataset")
                self._is_compared = True
        return evaluation_batches(
            self.dataset, None, self.microbatch_size, self._world, self.collate_fn
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position to continue from, and what the order of samples depends on."""
        return {
            "samples": self.samples,
            "epoch": self.epoch,
            "size": self._size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the samples of a state, in the next iteration.

        Args:
            state: Result of `state_dict`, at any number of ranks and any batch size. Only
                "samples" is required.

        Raises:
            ConfigError: If the state is of another order of samples, or of other data.
        """
        found = [*state] if isinstance(state, Mapping) else type(state).__name__
        valid = isinstance(state, Mapping) and "samples" in state
        hint = "is not a state of a DataLoader; pass what state_dict() returned"
        require(valid, "state", found, hint)
        _check_count("samples", state["samples"])
        own = self.state_dict()
        for name in ("size", "seed", "shuffle"):
            saved = state.get(name, own[name])
            problem = (
                f"the saved position is of an order of samples with {name} = {saved!r}, and would "
                "repeat some samples and leave out others; use the same dataset, seed and shuffle"
            )
            require(saved == own[name], name, own[name], problem)
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._samples = state["samples"]
        self._epoch = state.get("epoch", 0)


def step_of(microbatches: object) -> int | None:
    """Return which list of its `DataLoader` in this process a list is, from 1.

    None for a list that no loader has yielded last, such as one that was changed since.
    """
    return next((each._yielded for each in _loaders if each._latest is microbatches), None)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(name, value, "must be an integer of at least 0")
