"""Loads the microbatches of one rank for training: an endless sequence of steps."""

from __future__ import annotations

import atexit
import functools
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Subset, default_collate

from distmp.data.order import Division, MicrobatchSampler
from distmp.data.streams import Step, StreamSteps, sample_checksum
from distmp.distributed.collectives import backends
from distmp.distributed.comparison import check_same
from distmp.distributed.failing_together import describe, explain_lost_peers
from distmp.distributed.stopping import ignore_stop_signals
from distmp.distributed.world import World
from distmp.errors import DataError, DistmpError, listed
from distmp.utils.generators import generators_kept, seed_generators
from distmp.utils.processes import signal_when_parent_ends
from distmp.utils.tensor_trees import described


def collate_of(dataset: Any) -> Callable[[list[Any]], Any]:
    """Return the function that makes a microbatch of samples.

    It is `attribute_of(dataset, "collate_fn")`; without one, `collate`.
    """
    return attribute_of(dataset, "collate_fn") or collate


def attribute_of(dataset: Any, name: str) -> Any:
    """Return an attribute of a dataset, or of the one that is split into `Subset`s of torch.

    None if neither has it.
    """
    while not hasattr(dataset, name) and isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, name, None)


def collate(samples: Sequence[Any]) -> Any:
    """Combine samples into a microbatch, as torch's `default_collate` does.

    The values of a mapping may be lists of numbers, which is what Hugging Face datasets return
    without `with_format("torch")`: they become tensors [batch, length].

    Raises:
        DataError: If the samples cannot be stacked, for example because of their lengths.
    """
    converted = [_with_tensors(sample) for sample in samples]
    try:
        return default_collate(converted)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the samples of a microbatch cannot be stacked: {str(error).splitlines()[0]}; "
            f"the first is {described(converted[0])}; pad or crop the samples, or give a "
            "collate_fn(samples) that returns a microbatch"
        ) from error


def _with_tensors(sample: Any) -> Any:
    """Return a mapping with lists of numbers as tensors; any other sample as it is."""
    if not isinstance(sample, Mapping) or not any(isinstance(v, list) for v in sample.values()):
        return sample
    return {key: _as_tensor(value) for key, value in sample.items()}


def _as_tensor(value: Any) -> Any:
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if first is not value and isinstance(first, bool | int | float):
        with suppress(ValueError, TypeError, RuntimeError):  # lists of several lengths or types
            return torch.tensor(value)
    return value


# A sample per step of an epoch is compared between ranks, but at most so many, to take little time.
_COMPARED_SAMPLES = 16

Batch = dict[str, Tensor]
# Compares a description of the data between ranks.
_Check = Callable[[str], None]
_Steps = Generator[Step, None, None]
Collate = Callable[[list[Any]], Any]
"""Combines the samples of a microbatch."""


def steps(
    dataset: Any,
    division: Division,
    world: World | None = None,
    *,
    seed: int,
    shuffle: bool = True,
    workers: int = 0,
    collate_fn: Collate | None = None,
    setting: str = "data.source",
) -> _Steps:
    """Yield the steps of this rank, without end. The workers start in this call.

    Args:
        dataset: Map-style dataset, or an iterable one, which is read as `distmp.data.streams`
            describes. It may draw random numbers (see `SeededMicrobatches`); an attribute
            `draws_nothing = True` disables the seeding, which takes time.
        division: How samples are divided over steps, ranks and microbatches.
        world: Ranks that compare their datasets: samples of map-style ones in every epoch, streams
            in every step. None disables the comparison. With a GPU, tensors are in page-locked
            memory.
        seed: Seed of the order, and of what the dataset and `collate_fn` draw.
        shuffle: False reads a map-style dataset in the order of its indices.
        workers: Processes that prepare microbatches; 0 prepares them in this process.
        collate_fn: Combines samples into a microbatch; None uses `collate_of(dataset)`.
        setting: Name of the setting that holds the dataset, for error messages.

    Raises:
        ConfigError: On every rank, if ranks have different datasets.
    """
    loads: Callable[..., TorchDataLoader[Any]] = functools.partial(
        TorchDataLoader,
        num_workers=workers,
        pin_memory=world is not None and world.device.type == "cuda",
        # Python 3.14 would start a server, which stop signals end, and pickle the dataset.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_ignore_stop_signals,
        # Without a separate generator, the loader would draw from the one that dropout uses.
        generator=torch.Generator().manual_seed(seed % 2**63),
    )
    combine = collate_fn or collate_of(dataset)
    check = None
    if world is not None and _has_peers(world):
        check = functools.partial(check_same_source, world, setting)
    if is_stream(dataset):
        read = StreamSteps(dataset, division, seed, combine, compared=check is not None)
        loader = loads(read, batch_size=None, collate_fn=_unchanged)
        return _closed_at_exit(_compared(iter(loader), check))
    sampler = MicrobatchSampler(division, len(dataset), seed, shuffle=shuffle)
    seeded = SeededMicrobatches(dataset, seed, combine, collate_draws=collate_fn is not None)
    loader = loads(seeded, batch_sampler=sampler, collate_fn=_unchanged)
    return _closed_at_exit(_grouped(iter(loader), sampler, seeded, check))


def check_same_data(dataset: Any, batch_size: int, world: World, setting: str) -> None:
    """Compare the length and some samples of a map-style dataset between ranks. Collective.

    Streams are not compared.

    Raises:
        ConfigError: On every rank, if ranks have different datasets.
    """
    if _has_peers(world) and not is_stream(dataset):
        division = Division(0, batch_size, batch_size, rank=0, world_size=1)
        sampler = MicrobatchSampler(division, len(dataset), 0, shuffle=False)
        seeded = SeededMicrobatches(dataset, 0, _unchanged)
        check_same_source(world, setting, _description(sampler, seeded, 0))


def is_stream(dataset: Any) -> bool:
    """Return whether samples of a dataset have no index, and are read in its order."""
    if isinstance(dataset, IterableDataset):  # inherits a `__getitem__`
        return True
    return not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")


def _unchanged(value: Any) -> Any:
    """Return a microbatch that is collated already."""
    return value


def _has_peers(world: World) -> bool:
    return world.group is not None and world.world_size > 1


def check_same_source(world: World, setting: str, description: str) -> None:
    """Check that all ranks read the same samples, of which each then keeps its share.

    Raises:
        ConfigError: On every rank, with the descriptions by rank.
    """
    with explain_lost_peers(world.group):
        # On the CPU, the host does not wait for the GPU.
        device = torch.device("cpu") if "cpu" in backends(world.group) else world.device
        check_same(world.group, device, {setting: description}, _SAME_DATA)


_SAME_DATA = (
    "ranks read different data; distmp divides the samples over the ranks, so give every rank the "
    "same dataset in the same order: remove split_dataset_by_node or another division by rank, "
    "and seed a shuffle with the same number on all ranks"
)


def _grouped(
    microbatches: Iterator[Any],
    sampler: MicrobatchSampler,
    seeded: SeededMicrobatches,
    check: _Check | None,
) -> _Steps:
    """Yield the microbatches of a map-style dataset, step by step."""
    division, size = sampler.division, sampler.size
    compared = -1
    with _ending_workers(microbatches):
        for first in division.steps():
            if check is not None and first // size > compared:
                compared = first // size
                check(_description(sampler, seeded, first))
            own = [next(microbatches) for _ in range(division.microbatches)]
            yield Step(own, first // size, (first + division.global_batch_size) // size)


def _description(sampler: MicrobatchSampler, seeded: SeededMicrobatches, first: int) -> str:
    """Describe the epoch after a position: length, order and content of samples, size of steps."""
    size, batch = sampler.size, sampler.division.global_batch_size
    count = min(_COMPARED_SAMPLES, -(-size // batch))
    positions = [first + i * size // count for i in range(count)]
    places = [(each, *sampler.indices(range(each, each + 1))) for each in positions]
    with generators_kept():
        once, again = (sample_checksum([seeded.sample(*each) for each in places]) for _ in range(2))
    # A dataset may draw from other generators, which are not seeded.
    content = "random samples" if once != again else f"checksum {once:08x} of {count} of them"
    return (
        f"{size:,} samples in the order {sample_checksum(places):08x}, {content}, in steps of "
        f"{batch:,}"
    )


def _compared(all_steps: Iterator[Any], check: _Check | None) -> _Steps:
    """Yield the steps of a stream; compare the first one between ranks, before training."""
    with _ending_workers(all_steps):
        for step in all_steps:
            if check is not None:
                check(step.microbatches.source)
                check = None
            yield step


@contextmanager
def _ending_workers(iterator: Iterator[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        # A worker that blocks in a read ignores the SIGTERM of torch, and nothing of it is needed.
        for worker in getattr(iterator, "_workers", ()):
            worker.terminate = worker.kill
        # A deleted iterator ends its workers, but a traceback can keep it alive. An iterator
        # without workers has no such method.
        getattr(iterator, "_shutdown_workers", lambda: None)()


_open: weakref.WeakSet[_Steps] = weakref.WeakSet()


def _closed_at_exit(all_steps: _Steps) -> _Steps:
    _open.add(all_steps)
    return all_steps


@atexit.register
def _close_all() -> None:
    """End the workers that still run when the process ends.

    Functions of atexit run in reverse order: this one before that of multiprocessing, which torch
    has imported. That one sends SIGTERM to workers, which they ignore, and waits without a limit.
    """
    for all_steps in [*_open]:
        all_steps.close()


def _ignore_stop_signals(worker: int) -> None:
    """Ignore stop signals in a worker: the training process ends its step and closes the loader.

    Ctrl-C and the signals of a scheduler reach every process of a group. A worker that ended first
    would turn an orderly stop into a crash. The kernel kills the worker when the training process
    dies, also while it reads a sample.
    """
    ignore_stop_signals()
    signal_when_parent_ends()


# Note [Random numbers of samples]
# A dataset that crops, masks or shuffles draws from torch, numpy or Python's `random`. Seeding them
# for each position gives a resumed run the same samples that it would have had without the
# interruption, with any number of workers and ranks.


@dataclass
class SeededMicrobatches:
    """A dataset indexed by (position, index) that seeds the generators with the position.

    Args:
        dataset: Map-style dataset. An attribute `draws_nothing = True` disables the seeding for
            each sample, which takes time.
        seed: Seed of the run.
        collate: Combines samples into a microbatch.
        collate_draws: Whether `collate` may draw random numbers, too.
    """

    dataset: Any
    seed: int
    collate: Callable[[list[Any]], Any]
    collate_draws: bool = True

    def __post_init__(self) -> None:
        self._draws = not getattr(self.dataset, "draws_nothing", False)
        read = self.dataset
        while isinstance(read, Subset):  # has the method, whether or not its dataset has it
            read = read.dataset
        self._reads_together = getattr(read, "__getitems__", None) is not None

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> Any:
        """Return a collated microbatch; torch's data loader calls this method.

        Args:
            places: (position, index) of each sample.
        """
        if not (self._draws or self.collate_draws):
            return self.collate(self._samples(places))
        with generators_kept():
            samples = self._samples(places)
            seed_generators(f"microbatch {self.seed} {places[0][0]}")
            return self.collate(samples)

    def _samples(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        if not self._reads_together:
            return [self.sample(position, index) for position, index in places]
        self._seed_generators(places[0][0])
        indices = [index for _, index in places]
        return self._read(lambda: self.dataset.__getitems__(indices), indices)

    def sample(self, position: int, index: int) -> Any:
        """Return one sample; changes the state of the generators.

        Raises:
            DataError: If the dataset fails.
        """
        self._seed_generators(position)
        return self._read(lambda: self.dataset[index], [index])

    def _read(self, read: Callable[[], Any], indices: Sequence[int]) -> Any:
        try:
            return read()
        except DistmpError:
            raise
        except Exception as error:
            samples = f"sample{'s' * (len(indices) > 1)} {listed([*map(str, indices)])}"
            raise DataError(
                f"{samples} of the dataset {type(self.dataset).__qualname__} cannot be read: "
                f"{describe(error)} ({_place(error)})"
            ) from error

    def _seed_generators(self, position: int) -> None:
        if self._draws:
            seed_generators(f"sample {self.seed} {position}")


def _place(error: Exception) -> str:
    """Return the file and line in which an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
