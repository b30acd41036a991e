"""The data loader of users' loops: every sample once per epoch, at any number of ranks."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from distmp.data import loading
from distmp.data.dataloader import DataLoader
from distmp.data.evaluation import ForwardOnly
from distmp.data.order import sample_indices
from distmp.data.streams import sample_checksum
from distmp.distributed import roll_call
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.errors import ConfigError, DataError, TrainingError
from tests.ranks import from_all_ranks, ranks

CPU = torch.device("cpu")


class Numbers(IterableDataset[int]):
    """A stream whose passes have the numbers 0, 1, ..."""

    draws_nothing = True

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        length = self.lengths[self.passes % len(self.lengths)]
        self.passes += 1
        yield from range(length)


class NumbersWithLength(Numbers):
    def __len__(self) -> int:
        return self.lengths[0]


class Sized:
    """A map-style dataset whose length may be invalid."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> int:
        return index


class Skipping(Numbers):
    """Has the method `skip` of Hugging Face's datasets, and counts the samples it reads."""

    def __init__(self, length: int, skipped: int = 0, read: list[int] | None = None) -> None:
        super().__init__(length)
        self.skipped = skipped
        self.read: list[int] = [] if read is None else read

    def skip(self, count: int) -> Skipping:
        return Skipping(self.lengths[0], self.skipped + count, self.read)

    def __iter__(self) -> Iterator[int]:
        for number in range(self.skipped, self.lengths[0]):
            self.read.append(number)
            yield number


def rows(**columns: list[Any]) -> Any:
    """Return a dataset of Hugging Face."""
    import datasets  # takes seconds, also on each rank of a test

    return datasets.Dataset.from_dict(columns)


def on_rank(loader: DataLoader, rank: int, world_size: int) -> DataLoader:
    """Make a loader that of another rank, without processes."""
    loader._world = World(rank, world_size, CPU, None)
    return loader


def read(loaders: list[DataLoader], steps: int | None = None) -> list[list[int]]:
    """Return the samples of each step of one `for`, over all ranks."""
    read_by_rank = [
        [[int(n) for m in microbatches for n in m] for microbatches in islice(loader, steps)]
        for loader in loaders
    ]
    return [flat(parts) for parts in zip(*read_by_rank, strict=True)]


def flat(lists: Any) -> list[int]:
    return [item for part in lists for item in part]


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 40),
    microbatch=st.integers(1, 3),
    count=st.integers(1, 2),
    first_ranks=st.sampled_from([1, 2, 4]),
    then_ranks=st.sampled_from([1, 2, 4]),
    stops=st.lists(st.integers(0, 5), max_size=4),
    make=st.sampled_from(
        [
            lambda size: list(range(size)),
            Numbers,
            NumbersWithLength,
            Skipping,
            lambda size: (
                rows(x=list(range(size)))
                .to_iterable_dataset()
                .map(lambda row: {"n": row["x"]})
                .with_format("torch")
            ),
        ]
    ),
)
def test_stops_neither_lose_nor_repeat_samples(
    size: int,
    microbatch: int,
    count: int,
    first_ranks: int,
    then_ranks: int,
    stops: list[int],
    make: Callable[[int], Any],
) -> None:
    batch = microbatch * count * 4
    size = max(size, batch)
    is_hugging_face = type(make(size)).__module__.startswith("datasets")
    shuffled = isinstance(make(size), list)

    def build(number: int, state: dict[str, Any] | None) -> list[DataLoader]:
        loaders = []
        for rank in range(number):
            collate = (lambda rows: [row["n"] for row in rows]) if is_hugging_face else None
            loader = DataLoader(make(size), batch, microbatch, seed=5, collate_fn=collate)
            if state is not None:
                loader.load_state_dict(state)
            loaders.append(on_rank(loader, rank, number))
        return loaders

    seen: list[int] = []
    loaders = build(first_ranks, None)
    for number, steps in enumerate([*stops, None, None]):
        if number == 1:
            state = loaders[0].state_dict()
            assert state["samples"] == len(seen)
            loaders = build(then_ranks, state)
        epoch = len(seen) // size
        # One `for` ends with the step that holds the last sample of the epoch it began in.
        remaining = -(-((epoch + 1) * size - len(seen)) // batch)
        if shuffled:
            assert len(loaders[0]) == remaining
        done = read(loaders, steps)
        assert len(done) == (remaining if steps is None else min(steps, remaining))
        assert all(len(step) == batch for step in done)
        seen += flat(done)
        assert [loader.samples for loader in loaders] == [len(seen)] * len(loaders)
        if done:
            assert {loader.epoch for loader in loaders} == {len(seen) // size}
    expected = sample_indices(5, 0, len(seen), size).tolist() if shuffled else None
    assert seen == (expected or [position % size for position in range(len(seen))])


def test_epochs_of_varying_length_resume_at_right_sample() -> None:
    whole = DataLoader(Numbers(7, 5, 9), 4, 2)
    steps = [*read([whole]), *read([whole]), *read([whole])]
    assert flat(steps) == [*range(7), *range(5), *range(9), 0, 1, 2]
    for done in range(6):
        resumed = DataLoader(Numbers(7, 5, 9), 4, 2, first_sample=4 * done)
        first_epoch = 2 if done < 2 else 3 if done < 3 else 6
        assert read([resumed]) == steps[done:first_epoch]


def test_stream_with_skip_does_not_read_earlier_samples() -> None:
    dataset = Skipping(1000)
    loader = DataLoader(dataset, 4, 2, first_sample=900)
    assert read([loader], 2) == [[900, 901, 902, 903], [904, 905, 906, 907]]
    assert min(dataset.read) == 899  # the sample before may draw random numbers of skipped ones


def shuffled_stream() -> Any:
    return rows(x=list(range(20))).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=6)


def values(loader: DataLoader, steps: int | None = None) -> list[int]:
    return [n for microbatches in islice(loader, steps) for m in microbatches for n in m["x"]]


def test_shuffled_hugging_face_stream_resumes_in_any_epoch() -> None:
    loader = DataLoader(shuffled_stream(), 4, 2)
    first, second, third = values(loader), values(loader), values(loader)
    assert sorted(map(int, first)) == sorted(map(int, second)) == list(range(20))
    assert first != second != third
    for samples in range(0, 60, 4):
        resumed = DataLoader(shuffled_stream(), 4, 2, first_sample=samples)
        assert values(resumed) == (first + second + third)[samples : (samples // 20 + 1) * 20]


def shards() -> Any:
    return rows(x=list(range(17))).to_iterable_dataset(num_shards=3)


def interleaved() -> Any:
    import datasets

    sources = [rows(x=list(range(n, n + 9))).to_iterable_dataset() for n in (0, 100)]
    options = {"probabilities": [0.5, 0.5], "seed": 3, "stopping_strategy": "all_exhausted"}
    return datasets.interleave_datasets(sources, **options)


@pytest.mark.parametrize("stream", [shards, interleaved])
def test_sources_of_hugging_face_stream_resume_in_any_epoch(stream: Callable[[], Any]) -> None:
    """Hugging Face changes the order of shards and sources in each epoch, without a shuffle too."""
    loader = DataLoader(stream(), 4, 2)
    whole = [values(loader) for _ in range(3)]
    expected = [sample for each in whole for sample in each]
    for samples in range(0, len(expected), 4):
        found = values(DataLoader(stream(), 4, 2, first_sample=samples))
        assert found == expected[samples : samples + len(found)]
        assert found


class OfWorker(IterableDataset[Any]):
    """Divides its samples by worker, as the documentation of torch does."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from ({"x": n + 0.5 * (worker is not None)} for n in range(first, 20, step))


@pytest.mark.parametrize("stream", [shuffled_stream, OfWorker])
def test_stream_has_the_same_samples_in_a_worker(stream: Callable[[], Any]) -> None:
    found = [values(DataLoader(stream(), 4, 2, workers=workers)) for workers in (0, 1)]
    assert found[0] == found[1]


@pytest.mark.parametrize("batched", [False, True])
def test_skipped_samples_draw_no_random_numbers_of_others(batched: bool) -> None:
    def drawn(row: dict[str, Any]) -> dict[str, Any]:
        x = row["x"]
        return {"x": [n + random.random() for n in x] if batched else x + random.random()}

    def loader(samples: int) -> DataLoader:
        stream = rows(x=list(range(12))).to_iterable_dataset()
        stream = stream.map(drawn, batched=batched, batch_size=5)
        return DataLoader(stream, 4, 2, first_sample=samples)

    whole = values(loader(0))
    for samples in (4, 8):
        assert values(loader(samples)) == whole[samples:]


class ChangedBySkip(Numbers):
    """Changes its position in `skip`, as in `set_epoch`."""

    start = 0
    returned = True

    def skip(self, count: int) -> ChangedBySkip | None:
        self.start = count
        return self if self.returned else None

    def __iter__(self) -> Iterator[int]:
        yield from range(self.start, *self.lengths)


class ChangedBySkipAlone(ChangedBySkip):
    returned = False


class WithLinesToSkip(Numbers):
    skip = 1


@pytest.mark.parametrize("make", [ChangedBySkip, ChangedBySkipAlone, WithLinesToSkip])
def test_passes_after_resume_are_whole(make: Callable[[int], Any]) -> None:
    loader = DataLoader(make(8), 4, 2, first_sample=4)
    assert [flat(read([loader])) for _ in range(2)] == [[4, 5, 6, 7], [*range(8)]]


class ShuffledSkipping(IterableDataset[Any]):
    """Shuffles when it is read, and skips in that order."""

    def __init__(self, skipped: int = 0) -> None:
        self.skipped = skipped

    def skip(self, count: int) -> ShuffledSkipping:
        return ShuffledSkipping(self.skipped + count)

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(torch.randperm(24).tolist(), 24)
        for number in order[self.skipped :]:
            yield {"x": number + 0.5 * random.random()}


def test_skip_keeps_order_that_each_pass_draws() -> None:
    loader = DataLoader(ShuffledSkipping(), 4, 2)
    whole = values(loader) + values(loader)
    for samples in range(0, 48, 4):
        found = values(DataLoader(ShuffledSkipping(), 4, 2, first_sample=samples))
        assert found == whole[samples : samples + len(found)]


class Drawing(IterableDataset[float]):
    """Shuffles with Python's generator, and each sample draws from torch's and numpy's."""

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(10), 10)
        for index in order:
            yield torch.tensor([index, torch.rand(()).item(), np.random.rand()])


def masks(samples: list[Any]) -> torch.Tensor:
    return torch.cat([torch.stack(samples), torch.rand(len(samples), 1)], dim=1)


class DrawsNothing(TensorDataset):
    """Only `collate_fn` draws."""

    draws_nothing = True


@pytest.mark.parametrize("make", [Drawing, lambda: DrawsNothing(torch.arange(10.0))])
def test_random_numbers_of_samples_follow_position(make: Any) -> None:
    def drawn(first_sample: int, world_size: int = 1, workers: int = 0) -> torch.Tensor:
        parts = []
        for rank in range(world_size):
            loader = DataLoader(
                make(), 4, 2, collate_fn=collate, first_sample=first_sample, workers=workers
            )
            steps = [
                torch.cat(step) for _ in range(2) for step in on_rank(loader, rank, world_size)
            ]
            parts.append(torch.stack(steps))
            del loader
        return torch.cat(parts, dim=1)

    def collate(samples: list[Any]) -> torch.Tensor:
        return masks([s[0].view(1) if isinstance(s, tuple) else s for s in samples])

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    whole = drawn(0)
    assert torch.equal(torch.rand(2), expected)  # those of the model are left alone
    assert len(whole.unique(dim=0)) == len(whole)
    assert torch.equal(drawn(8), whole[2:])
    assert torch.equal(drawn(0, world_size=2), whole)
    if make is Drawing:  # lambdas cannot be sent to workers, and forked ones can
        assert torch.equal(drawn(0, workers=1), whole)
    assert multiprocessing.active_children() == []


def test_len_is_constant_during_iteration() -> None:
    loader = DataLoader(range(10), 4, 2)
    assert [len(loader) for _ in loader] == [3, 3, 3]
    assert [len(loader) for _ in loader] == [2, 2]
    loader = DataLoader(range(100), 32, 32)
    assert [len(list(loader)) for _ in range(3)] == [4, 3, 3]
    with pytest.raises(TypeError, match="has no length"):
        len(DataLoader(Numbers(10), 4, 2))


def test_hugging_face_lists_become_tensors() -> None:
    columns = {"input_ids": [[1, 2, 3], [4, 5, 6]], "text": ["a", "b"], "score": [0.5, 1.0]}
    ((batch,),) = list(DataLoader(rows(**columns), 2, 2, shuffle=False))
    assert batch["input_ids"].tolist() == columns["input_ids"]
    assert batch["text"] == ["a", "b"]
    assert batch["score"].tolist() == columns["score"]
    encodings = [UserDict({"input_ids": [n, n + 1]}) for n in (1, 4)]
    ((batch,),) = list(DataLoader(encodings, 2, 2, shuffle=False))
    assert batch["input_ids"].tolist() == [[1, 2], [4, 5]]


def test_error_for_unequal_samples_names_shapes() -> None:
    ragged = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    with pytest.raises(DataError, match=r"cannot be stacked.*input_ids: int64 \[2\].*pad"):
        next(iter(DataLoader(ragged, 2, 2, shuffle=False)))


def test_each_sample_is_evaluated_once() -> None:
    for dataset in (
        [{"targets": torch.tensor([n])} for n in range(11)],
        rows(targets=[[n] for n in range(11)]).to_iterable_dataset(),
    ):
        for world_size in (1, 2, 3):
            seen: list[list[int]] = []
            for rank in range(world_size):
                loader = on_rank(DataLoader(dataset, 6, 2), rank, world_size)
                counted = [m for m in loader.once() if not isinstance(m, ForwardOnly)]
                seen.append([int(n) for m in counted for n in m["targets"]])
                assert loader.samples == 0
            assert sorted(n for part in seen for n in part) == list(range(11))


@ranks(2)
def test_streams_of_other_lengths_on_ranks_are_refused_in_evaluation() -> None:
    rank = torch.distributed.get_rank()
    for length in (9, 12, 17, 18):
        samples = rows(targets=[[n] for n in range(length if rank else 8)])
        batches = DataLoader(samples.to_iterable_dataset(), 4, 2).once()
        assert len([next(batches), next(batches)]) == 2
        with pytest.raises(ConfigError, match=r"dataset = 8 samples of a stream, .* on rank 0; "):
            next(batches)


@ranks(2)
def test_streams_of_other_samples_on_ranks_are_refused_in_evaluation() -> None:
    first = 5 * torch.distributed.get_rank()
    samples = rows(targets=[[n] for n in range(first, first + 5)])
    with pytest.raises(ConfigError, match=r"dataset = 4 samples of a stream, checksum"):
        list(DataLoader(samples.to_iterable_dataset(), 4, 2).once())


@ranks(2)
def test_streams_are_compared_by_content_only_once() -> None:
    samples = rows(targets=[[n] for n in range(12)]).to_iterable_dataset()
    with mock.patch("distmp.data.evaluation.sample_checksum", wraps=sample_checksum) as checksum:
        assert len(list(DataLoader(samples, 4, 2).once())) == 3
    assert checksum.call_count == 1


def test_default_step_is_one_microbatch_per_rank() -> None:
    loader = DataLoader([{"targets": torch.tensor([n])} for n in range(12)], 6)
    assert [len(m["targets"]) for step in loader for m in step] == [6, 6]


@ranks(2)
def test_batch_that_ranks_cannot_share_is_refused_without_microbatch_size() -> None:
    with pytest.raises(ConfigError, match=r"batch_size = 9: must be a multiple .* of ranks, 2$"):
        DataLoader(range(20), 9)


@pytest.mark.parametrize(
    ("name", "message"),
    [("num_workers", "'num_workers': use workers"), ("drop_last", "remove it"), ("x", "see help")],
)
def test_argument_of_other_loader_is_one_message(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        DataLoader(range(9), 4, **{name: 1})  # type: ignore[arg-type]


def stream_by_node() -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(shuffled_stream(), rank=0, world_size=2)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (TorchDataLoader([1]), {}, r"DataLoader': is not a dataset; pass its dataset"),
        (
            DistributedSampler([1], 1, 0),
            {},
            "DistributedSampler': is not a dataset; pass its dataset",
        ),
        (iter([1, 2]), {}, "can be read only once"),
        ((n for n in range(4)), {}, "can be read only once"),
        ({"train": [1]}, {}, "holds several datasets; pass one of 'train'"),
        (3, {}, "it needs __len__ and __getitem__"),
        ([], {}, "has no sample"),
        (NumbersWithLength(-1), {}, r"no valid length .*>= 0\); return an integer of 1 or more"),
        (Sized(-1), {}, r"'Sized': has no valid length .*>= 0\); return an integer"),
        (Sized(4.0), {}, r"'Sized': has no valid length \('float' object .*return an integer"),
        (stream_by_node, {}, "divided over the ranks by split_dataset_by_node"),
        (Numbers(9), {"workers": 2}, "workers = 2: each worker would read the whole stream"),
        (Numbers(9), {"shuffle": True}, "read in its own order"),
        (range(9), {"batch_size": 5}, r"batch_size = 5: must be a multiple of microbatch_size"),
        (range(3), {}, "is more than the 3 samples of an epoch"),
        (range(9), {"batch_size": 4.0}, "batch_size = 4.0: must be an integer"),
        (range(9), {"seed": None}, "seed = None: must be an integer"),
    ],
)
def test_misuse_is_one_message(dataset: Any, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "microbatch_size": 2} | options
    with pytest.raises(ConfigError, match=message):
        DataLoader(dataset() if dataset is stream_by_node else dataset, **arguments)


def test_state_of_other_data_is_refused() -> None:
    state = DataLoader(range(10), 4, 2, seed=1).state_dict()
    for loader, name in (
        (DataLoader(range(11), 4, 2, seed=1), "size"),
        (DataLoader(range(10), 4, 2), "seed"),
        (DataLoader(range(10), 4, 2, seed=1, shuffle=False), "shuffle"),
    ):
        with pytest.raises(ConfigError, match=f"with {name} = .*would repeat some samples"):
            loader.load_state_dict(state)


def test_step_limit_before_loader_draws_no_unused_samples() -> None:
    for limited, samples in (
        (lambda loader: zip(range(2), loader, strict=False), 8),
        (lambda loader: islice(loader, 2), 8),
        (lambda loader: zip(loader, range(2), strict=False), 12),  # as docs/engine.md says
    ):
        loader = DataLoader(range(20), 4)
        assert len([*limited(loader)]) == 2
        assert loader.state_dict()["samples"] == samples


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"^state = \[\]: is not a state of a DataLoader; pass what state_dict\(\) returned$"),
        ({"step": 3}, r"^state = \['step'\]: is not a state of a DataLoader"),
        (None, "^state = 'NoneType': is not a state of a DataLoader"),
        ({"samples": None}, "^samples = None: must be an integer of at least 0"),
    ],
)
def test_invalid_state_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(range(10), 4, 2).load_state_dict(state)


def test_fixed_attributes_cannot_be_assigned() -> None:
    loader = DataLoader(range(10), 4, 2, shuffle=False)
    next(iter(loader))
    for name, value in {"batch_size": 8, "samples": 0, "dataset": [1], "seed": 1}.items():
        with pytest.raises(ConfigError, match=rf"^{name} = .*cannot be assigned; continue at"):
            setattr(loader, name, value)
    assert loader.samples == 4
    assert [m.tolist() for m in next(iter(loader))] == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (NumbersWithLength(10, 8), "gave 8 samples in pass 2, and its __len__ is 10"),
        (Numbers(10, 0), "gave no sample in pass 2; each call of its __iter__ has to begin"),
    ],
)
def test_exhausted_stream_is_one_message(dataset: Any, message: str) -> None:
    loader = DataLoader(dataset, 5, 5)
    assert read([loader]) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]  # this epoch is complete
    with pytest.raises(DataError, match=message):
        read([loader])
    assert loader.samples in (10, 15)


class OfRank(IterableDataset[int]):
    """Another stream on each rank."""

    draws_nothing = True

    def __init__(self, *passes: range) -> None:
        self.passes = passes

    def __iter__(self) -> Iterator[int]:
        yield from self.passes[torch.distributed.get_rank()]


class Unseeded:
    """Draws from a generator of its own."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(np.random.default_rng().random())


class CountedReads:
    """Counts how often a sample is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


@ranks(2)
def test_samples_in_another_order_on_each_rank_are_refused() -> None:
    rank, refused = torch.distributed.get_rank(), r"on rank 0; .* on rank 1: ranks read different"
    order = [*range(500), *random.Random(rank).sample(range(500, 1000), 500)]
    for shuffle in (True, False):
        with pytest.raises(ConfigError, match=refused):
            next(iter(DataLoader(order, 8, 2, shuffle=shuffle)))
    with pytest.raises(ConfigError, match=refused):
        DataLoader(order, 8, 2).once()
    # The same dataset, which the ranks read in another order.
    for options in ({"seed": rank}, {"shuffle": bool(rank)}):
        with pytest.raises(ConfigError, match=refused):
            next(iter(DataLoader(range(1000), 8, 2, **options)))
    # Shuffled in place between two epochs.
    samples = [*range(64)]
    loader = DataLoader(samples, 8, 2)
    assert len([*loader]) == 8
    random.Random(rank).shuffle(samples)
    with pytest.raises(ConfigError, match=refused):
        next(iter(loader))


@ranks(2)
def test_datasets_that_differ_between_ranks_are_refused() -> None:
    rank = torch.distributed.get_rank()
    shares = [range(0, 20, 2), range(1, 20, 2)]
    for dataset in (list(shares[rank]), OfRank(*shares), list(range(20 + rank))):
        with pytest.raises(ConfigError, match=r"on rank 0; .* on rank 1: ranks read different"):
            next(iter(DataLoader(dataset, 4, 2)))
    for dataset in (list(shares[rank]), list(range(20 + rank))):
        with pytest.raises(ConfigError, match=r"on rank 0; .* on rank 1: ranks read different"):
            DataLoader(dataset, 4, 2).once()
    assert len([*DataLoader(Unseeded(), 4, 2).once()]) == 2
    counted = CountedReads()
    loader = DataLoader(counted, 4, 2)
    loader.once()
    first = counted.reads
    loader.once()  # compared already
    assert counted.reads == first > 0
    # Samples may differ between ranks if they differ between two reads on a rank.
    assert len(next(iter(DataLoader(Unseeded(), 4, 2)))) == 1
    with pytest.raises(ConfigError, match=r"in steps of 4 on rank 0; .* in steps of 8 on rank 1"):
        next(iter(DataLoader(range(8), 4 + 4 * rank, 2)))
    # The same samples at first, and a pass that ends earlier on a rank.
    engine = Engine(
        torch.nn.Linear(1, 1),
        lambda module, batch: (module(batch.float()[:, None]).sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1),
    )
    steps = iter(DataLoader(OfRank(range(16), range(14)), 4, 2))
    engine.step(next(steps))
    with pytest.MonkeyPatch.context() as patch:
        # Only the first step needs a collective of its own.
        patch.setattr(loading, "check_same", lambda *_: pytest.fail("a further collective"))
        for _ in range(2):
            engine.step(next(steps))
        before = next(engine.module.parameters()).clone()
        with pytest.raises(ConfigError, match=r"0 samples into pass 2 .* 2 samples into pass 2"):
            engine.step(next(steps))
    assert torch.equal(next(engine.module.parameters()), before)
    # The world is found without an engine, and both ranks together read every sample.
    own = [int(n) for step in DataLoader(range(8), 4, 2) for m in step for n in m]
    gathered = from_all_ranks(own)
    assert sorted(gathered[0] + gathered[1]) == list(range(8))


@ranks(2)
def test_rank_that_reads_step_alone_is_reported() -> None:
    roll_call.PATIENCE_SECONDS = 0.2
    loader = DataLoader(range(8), 4, 2)
    loader.load_state_dict({"samples": 4 * torch.distributed.get_rank()})
    with pytest.raises(TrainingError, match=r"waits in an iteration of a DataLoader from sample"):
        next(iter(loader))


SCRIPT = """
import torch
import distmp

batches = distmp.DataLoader(torch.arange(12.0), batch_size=4, microbatch_size=2, workers=1)
for microbatches in batches:
    pass
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise ValueError('of the script')", 1)])
def test_script_with_workers_ends(end: str, code: int) -> None:
    """The loader still exists when the interpreter exits, and workers ignore SIGTERM."""
    script = [sys.executable, "-c", SCRIPT.format(end=end)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code
    assert ("ValueError: of the script" in ended.stderr) == bool(code)
