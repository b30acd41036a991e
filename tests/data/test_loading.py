from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import IterableDataset

from distmp.data.evaluation import ForwardOnly, evaluation_batches
from distmp.data.loading import steps as all_steps
from distmp.data.order import Division, sample_indices
from distmp.distributed.stopping import STOP_SIGNALS
from distmp.distributed.world import World
from distmp.errors import DataError


class Numbers:
    """Sample i is {"inputs": [i], "targets": [i]}."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": torch.tensor([index]), "targets": torch.tensor([index])}


class Pairs(Numbers):
    """The same as a tuple."""

    def __getitem__(self, index: int) -> Any:
        return (torch.tensor([index]), torch.tensor([float(index)]))


def batches(dataset: Any = None, size: int = 24, microbatch: int = 2, **changes: int) -> Any:
    """Yield the microbatches of a rank in global batches of `size`; by default of the only one."""
    first, rank, world_size = (
        changes.pop(name, default)
        for name, default in (("first_sample", 0), ("rank", 0), ("world_size", 1))
    )
    division = Division(first, size, microbatch, rank, world_size)
    return all_steps(dataset or Numbers(50), division, seed=3, **changes)


def inputs(steps: Any, count: int) -> list[list[list[int]]]:
    return [
        [m["inputs"].flatten().tolist() for m in step.microbatches] for step in islice(steps, count)
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_global_batches(workers: int, world_size: int) -> None:
    gathered: list[list[int]] = [[], [], []]
    for rank in range(world_size):
        steps = batches(first_sample=7, rank=rank, world_size=world_size, workers=workers)
        for step, microbatches in enumerate(inputs(steps, 3)):
            assert len(microbatches) == 12 // world_size
            gathered[step] += [index for microbatch in microbatches for index in microbatch]
        steps.close()
    for step in range(3):
        assert gathered[step] == sample_indices(3, 7 + 24 * step, 24, 50).tolist()


def test_resume_is_identical_at_other_world_size() -> None:
    whole = inputs(batches(), 4)
    halves = [inputs(batches(first_sample=48, rank=r, world_size=2), 2) for r in (0, 1)]
    assert [halves[0][step] + halves[1][step] for step in (0, 1)] == whole[2:]


def test_loading_does_not_use_model_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    next(batches())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_or_deleting_loader_ends_workers(workers: int) -> None:
    steps = batches(workers=workers)
    next(steps)
    assert len(multiprocessing.active_children()) == workers
    if workers == 2:
        steps.close()
    del steps
    assert multiprocessing.active_children() == []


class Blocking(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index >= 24:
            time.sleep(3600)
        return super().__getitem__(index)


def test_closing_loader_ends_worker_that_blocks_in_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    steps = batches(Blocking(50), workers=1, shuffle=False)
    next(steps)
    steps.close()
    assert multiprocessing.active_children() == []


def test_workers_ignore_stop_signals() -> None:
    steps = batches(workers=2)
    next(steps)
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, number)
    time.sleep(0.2)
    assert len(inputs(steps, 20)) == 20
    steps.close()


def test_workers_are_forked_with_another_default_too() -> None:
    """Python 3.14 has another one."""

    class Local(Numbers):
        """Cannot be pickled."""

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        steps = batches(Local(50), workers=1)
        assert inputs(steps, 1) == inputs(batches(), 1)
        steps.close()
    finally:
        multiprocessing.set_start_method(before, force=True)


class Failing(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise DataError("file x.txt is gone")


@pytest.mark.parametrize("workers", [0, 1])
def test_dataset_errors_pass_through_and_end_workers(workers: int) -> None:
    steps = batches(Failing(10), 2, 1, workers=workers)
    with pytest.raises(DataError, match=r"file x\.txt is gone"):
        next(steps)
    steps.close()
    assert multiprocessing.active_children() == []


# --- evaluation ---


def world(rank: int, world_size: int) -> World:
    return World(rank, world_size, torch.device("cpu"), None)


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 80)),
    st.integers(1, 7),
    st.integers(1, 6),
)
def test_ranks_evaluate_each_sample_once_in_equal_steps(
    size: int, samples: int | None, microbatch_size: int, world_size: int
) -> None:
    seen: list[int] = []
    forwards = []
    for rank in range(world_size):
        own = list(
            evaluation_batches(Numbers(size), samples, microbatch_size, world(rank, world_size))
        )
        forwards.append(len(own))
        for batch in own:
            if isinstance(batch, ForwardOnly):
                assert len(batch.batch["inputs"]) == 1
                continue
            assert 1 <= len(batch["inputs"]) <= microbatch_size
            seen += batch["inputs"].flatten().tolist()
    assert len(set(forwards)) == 1
    chosen = size if samples is None else min(samples, size)
    assert sorted(seen) == [i * size // chosen for i in range(chosen)]
    assert len(set(seen)) == chosen


class Drawing(Numbers):
    """Draws its samples."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


class DrawingStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(()) for _ in range(8))


class ShuffledStream(IterableDataset[Tensor]):
    """Draws its order when a pass begins, not at its first sample."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(8))


@pytest.mark.parametrize("dataset", [Drawing(8), DrawingStream(), ShuffledStream()])
def test_random_numbers_of_samples_depend_on_no_rank(dataset: Any) -> None:
    def values(world_size: int) -> list[float]:
        of_ranks = [evaluate(dataset, rank, world_size) for rank in range(world_size)]
        return sorted(torch.cat([batch for own in of_ranks for batch in own]).tolist())

    state = torch.get_rng_state()
    first = values(1)
    assert len(set(first)) == 8
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert values(2) == first


def test_collate_functions_draw_the_same_in_every_evaluation() -> None:
    def mask(samples: list[Any]) -> Tensor:
        return torch.rand(len(samples))

    def masks(dataset: Any) -> list[list[float]]:
        return [each.tolist() for each in evaluation_batches(dataset, None, 2, world(0, 1), mask)]

    for dataset in (Drawing(8), DrawingStream()):
        first, state = masks(dataset), torch.get_rng_state()
        torch.rand(3)
        assert masks(dataset) == first
        torch.set_rng_state(state)
        masks(dataset)
        assert torch.equal(torch.get_rng_state(), state)


def evaluate(dataset: Any, rank: int = 1, world_size: int = 2) -> list[Any]:
    return list(evaluation_batches(dataset, None, 2, world(rank, world_size)))


def test_any_sample_can_serve_as_padding() -> None:
    counted, forward_only = evaluate(Pairs(6))
    assert counted[0].flatten().tolist() == [2, 3]
    assert [part.tolist() for part in forward_only.batch] == [[[4]], [[4.0]]]


def test_divisible_dataset_needs_no_padding() -> None:
    assert [batch[0].flatten().tolist() for batch in evaluate(Pairs(8))] == [[2, 3], [6, 7]]


class Collated(Numbers):
    """Its `collate_fn` returns the sum of a microbatch."""

    def collate_fn(self, samples: list[Any]) -> Any:
        total = sum(int(sample["inputs"]) for sample in samples)
        return {"targets": torch.tensor([total])}


def test_dataset_builds_microbatches_in_training_and_evaluation() -> None:
    part: Any = torch.utils.data.Subset(Collated(20), range(10, 16))  # type: ignore[arg-type]
    nested = torch.utils.data.Subset(part, range(6))
    for dataset in (part, nested):
        expected = [[10 + 11], [14 + 15]], [[12 + 13], [14]]
        for rank in (0, 1):
            found = [
                (batch.batch if isinstance(batch, ForwardOnly) else batch)["targets"].tolist()
                for batch in evaluate(dataset, rank)
            ]
            assert found == expected[rank]
        steps = batches(dataset, 6, 3)
        assert sum(int(batch["targets"]) for batch in next(steps).microbatches) == sum(
            range(10, 16)
        )
        steps.close()


def test_empty_evaluation_has_no_batches() -> None:
    assert evaluate(Numbers(0)) == []
