from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distmp.data.loading import SeededMicrobatches
from distmp.data.loading import steps as all_steps
from distmp.data.order import Division
from distmp.errors import DataError


class Augmented:
    """Each sample draws from all three generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        drawn = (torch.rand(()).item(), np.random.rand(), random.random())
        return torch.tensor([index, *drawn], dtype=torch.float64)


class AugmentedMicrobatch(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Plain(Augmented):
    draws_nothing = True


def drawn(
    dataset: Any, steps: int, first_sample: int = 0, world_size: int = 1, workers: int = 0
) -> Tensor:
    """Return the samples of all ranks in the order of the global batches, [steps, 8, 4]."""
    ranks = []
    for rank in range(world_size):
        division = Division(first_sample, 8, 2, rank, world_size)
        batches = all_steps(dataset, division, seed=3, workers=workers)
        own = [torch.cat(step.microbatches) for step in islice(batches, steps)]
        ranks.append(torch.stack(own))
        batches.close()
    return torch.cat(ranks, dim=1)


@pytest.mark.parametrize("dataset", [Augmented(), AugmentedMicrobatch()])
def test_random_numbers_depend_only_on_position(dataset: Augmented) -> None:
    whole = drawn(dataset, 4)
    assert torch.equal(drawn(dataset, 2, first_sample=16), whole[2:])
    assert torch.equal(drawn(dataset, 4, world_size=2), whole)
    assert torch.equal(drawn(dataset, 2, first_sample=16, world_size=2, workers=1), whole[2:])


def test_random_numbers_differ_by_sample_and_epoch() -> None:
    found = drawn(Augmented(), 5).flatten(0, 1)
    assert sorted(found[:10, 0].tolist()) == list(range(10))
    for generator in (1, 2, 3):
        assert len(set(found[:, generator].tolist())) == len(found)


def test_process_generators_are_unchanged() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    drawn(Augmented(), 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    drawn(Plain(), 1)
    assert not torch.equal(torch.get_rng_state(), before[0])


def test_subset_draws_for_each_sample_like_its_dataset() -> None:
    """torch's `Subset` reads several samples at once, whether or not its dataset does."""
    part: Any = torch.utils.data.Subset(Augmented(), range(8))  # type: ignore[arg-type]
    places = [(index, index) for index in range(8)]
    expected = SeededMicrobatches(Augmented(), 0, torch.stack).__getitems__(places)
    for size in (2, 4):
        seeded = SeededMicrobatches(part, 0, torch.stack)
        found = [seeded.__getitems__(places[first : first + size]) for first in range(0, 8, size)]
        assert torch.equal(torch.cat(found), expected)


class Failing(AugmentedMicrobatch):
    def __getitem__(self, index: int) -> Tensor:
        raise ValueError("corrupt")


class Ending(Augmented):
    def __getitem__(self, index: int) -> Tensor:
        raise StopIteration


def test_failing_microbatch_names_its_samples() -> None:
    with pytest.raises(DataError, match=r"^samples 3, 7 of the dataset Failing cannot .*: corrupt"):
        SeededMicrobatches(Failing(), 0, list).__getitems__([(0, 3), (1, 7)])
    with pytest.raises(DataError, match=r"^sample 3 of the dataset Ending cannot .*StopIteration"):
        SeededMicrobatches(Ending(), 0, list).__getitems__([(0, 3), (1, 7)])
