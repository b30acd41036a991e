"""Iterable datasets: samples in the order of the dataset, divided over ranks by position.

Every rank reads the whole stream and keeps the samples at its positions, so the samples of a step
are the same at any number of ranks, and the number of consumed samples is the position to resume
from. A pass that has ended is followed by the next one, so training reads an endless sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from distmp.data.order import Division
from distmp.errors import DataError
from distmp.utils.generators import generator_states, generators_kept, seed_generators
from distmp.utils.tensor_trees import checksum

_END = object()


class StreamMicrobatches(list[Any]):
    """The microbatches of a step that was read from a stream.

    Attributes:
        source: What the stream yielded on all ranks together, as text. The fingerprint of a step of
            the engine contains it: ranks may read different streams. "" if it is not compared.
    """

    source = ""


class Step(NamedTuple):
    """The samples of one step on this rank.

    Attributes:
        microbatches: Collated microbatches.
        epoch: Pass over the dataset, from 0, that the first sample of the step belongs to.
        next_epoch: Pass that the first sample after the step belongs to.
    """

    microbatches: list[Any]
    epoch: int
    next_epoch: int


class Stream:
    """The endless samples of an iterable dataset, pass after pass.

    The next sample is always read ahead, so that the end of a pass is known with its last sample.

    Args:
        dataset: Every `iter(dataset)` begins a new pass. Before each, `set_epoch(epoch)` is
            called if the dataset has it.
        seed: Seed of random numbers that the dataset draws, see `SeededMicrobatches`.
        first_sample: Number of samples to skip. With a method `skip(n)`, as datasets of Hugging
            Face have it, and with `__len__`, fewer of them are read. It is called on a shallow copy
            of the dataset, and returns the remaining samples, or None if it changes the copy.

    Attributes:
        epoch: The pass that the next sample belongs to, from 0.

    Raises:
        DataError: If a pass has no samples, or not as many as `len(dataset)`.
    """

    def __init__(self, dataset: Any, seed: int, first_sample: int) -> None:
        self.epoch = 0
        self._dataset = dataset
        self._seeded = not getattr(dataset, "draws_nothing", False)
        self._seed = seed
        self._length = length_of(dataset)
        self._samples: Iterator[Any] = iter(())
        self._read = 0  # samples of this pass that were read or skipped
        self._start = 0  # position of the first sample of this pass, over all passes
        self._seek(first_sample)

    @property
    def ahead(self) -> Any:
        """The next sample."""
        if self._ahead is _END:  # begin the next pass only when it is needed
            self._begin(self._dataset)
            if not self._draw():
                self._end_pass()
        return self._ahead

    @property
    def offset(self) -> int:
        """Number of samples of this epoch before the next sample."""
        return 0 if self._ahead is _END else self._read - 1

    def next(self) -> Any:
        """Return the next sample, and read the one after it."""
        sample = self.ahead
        if not self._draw():
            self._end_pass()
        return sample

    def _seek(self, first_sample: int) -> None:
        rest = first_sample
        if self._length:
            self.epoch, rest = divmod(first_sample, self._length)
            self._start = first_sample - rest
        while not self._begin_after(rest):
            rest -= self._read
            self._end_pass()

    def _begin_after(self, count: int) -> bool:
        """Begin this pass after `count` samples; return False if it has no more than these."""
        hugging_face = hasattr(self._dataset, "num_shards")
        # Hugging Face may reorder shards and sources in each epoch, but skips in the first order.
        reordered = hugging_face and self.epoch > 0
        if count > 1 and callable(getattr(self._dataset, "skip", None)) and not reordered:
            rest = copy.copy(self._dataset)  # `skip` may change it; the next pass is a whole one
            samples = rest.skip(count - 1)
            self._begin(rest if samples is None else samples)
            self._seed_sample()
            before = generator_states()
            # The first read draws as that of the whole pass, whose order it may shuffle, and as
            # skipped samples, which it may compute.
            found = self._draw()
            # Hugging Face may have computed later samples of a batch, too: they would have other
            # random numbers than without the resume.
            exact = not hugging_face or generator_states() == before
            self._read = count
            if found and exact and self._draw():
                return True
        # Also if the pass is shorter, to count its samples.
        self._begin(self._dataset)
        found = self._draw()
        while found and self._read <= count:
            found = self._draw()
        return found

    def _begin(self, samples: Any) -> None:
        self._read = 0
        # Also on the result of `skip`: with Hugging Face it is a copy that loses the epoch.
        if hasattr(samples, "set_epoch"):
            samples.set_epoch(self.epoch)
        if self._seeded:
            seed_generators(f"pass {self._seed} {self.epoch}")
        self._samples = iter(samples)

    def _end_pass(self) -> None:
        name = type(self._dataset).__name__
        if not self._read:
            raise DataError(
                f"the dataset {name} gave no sample in pass {self.epoch + 1}; each call of its "
                "__iter__ has to begin a new pass"
            )
        if self._length is not None and self._read != self._length:
            raise DataError(
                f"the dataset {name} gave {self._read:,} samples in pass {self.epoch + 1}, and "
                f"its __len__ is {self._length:,}; correct __len__, or remove it"
            )
        self.epoch += 1
        self._start += self._read

    def _draw(self) -> bool:
        """Read the next sample of this pass; return whether there is one."""
        self._seed_sample()
        self._ahead = next(self._samples, _END)
        if self._ahead is _END:
            return False
        self._read += 1
        return True

    def _seed_sample(self) -> None:
        if self._seeded:
            seed_generators(f"sample {self._seed} {self._start + self._read}")


@dataclass(eq=False)
class StreamSteps(IterableDataset[Step]):
    """The steps of this rank, read from a stream.

    Args:
        dataset: The iterable dataset.
        division: How samples are divided over steps, ranks and microbatches.
        seed: Seed of random numbers that the dataset or `collate` draws.
        collate: Combines samples into a microbatch.
        compared: Whether microbatches have a `source`.
    """

    dataset: Any
    division: Division
    seed: int
    collate: Callable[[list[Any]], Any]
    compared: bool

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps, without end. The dataset does not see that it is read in a worker."""
        # Hugging Face draws another order in a worker; with one worker, nothing is to be divided.
        worker._worker_info = None
        with generators_kept():
            stream = Stream(self.dataset, self.seed, self.division.first_sample)
        for first in self.division.steps():
            with generators_kept():
                step = self._step(stream, first)
            yield step

    def _step(self, stream: Stream, first: int) -> Step:
        """Read all samples of a step, and keep those of this rank."""
        ahead = stream.ahead  # may begin the next epoch
        digest = sample_checksum(ahead) if self.compared else 0
        epoch = stream.epoch
        own = self.division.own(first)
        microbatches = StreamMicrobatches()
        samples: list[Any] = []
        for position in range(first, first + self.division.global_batch_size):
            sample = stream.next()
            if position in own:
                samples.append(sample)
            if len(samples) == self.division.microbatch_size:
                seed_generators(f"microbatch {self.seed} {position + 1 - len(samples)}")
                microbatches.append(self.collate(samples))
                samples = []
        if self.compared:
            microbatches.source = (
                f"a stream with checksum {digest:08x} of its sample at position {first:,}, and "
                f"{stream.offset:,} samples into pass {stream.epoch + 1} after this step"
            )
        return Step(microbatches, epoch, stream.epoch)


def length_of(dataset: Any) -> int | None:
    """Return the number of samples of a dataset; None if it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def sample_checksum(sample: Any) -> int:
    """Return a checksum of a sample, to compare it between ranks."""
    # The `repr` of other objects may hold an address.
    return checksum(sample, lambda value: type(value).__name__)
