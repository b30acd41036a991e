from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from distmp.buckets.layout import plan_buckets
from distmp.buckets.partial_sums import FlatGradients, PartialSums

LAYOUTS = plan_buckets(
    [("a", nn.Parameter(torch.zeros(5))), ("b", nn.Parameter(torch.zeros(40)))], 1
)


def leaves(count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [
        [torch.randn(layout.size, generator=generator) for layout in LAYOUTS] for _ in range(count)
    ]


def tree(values: list[Tensor]) -> Tensor:
    half = len(values) // 2
    return values[0] if half == 0 else tree(values[:half]) + tree(values[half:])


def chain(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def summed(sums: PartialSums, values: list[list[Tensor]], sets: set[int]) -> list[Tensor]:
    """Sum as the buckets do, the last microbatch per bucket; record the sets that were used."""
    leaf = FlatGradients(LAYOUTS)
    for index, value in enumerate(values):
        sets.add(id(leaf))
        for buffer, content in zip(leaf.buffers, value, strict=True):
            buffer.copy_(content)
        if index < len(values) - 1:
            leaf = sums.add(leaf)
    totals = [sums.add_last(leaf, bucket) for bucket in range(len(LAYOUTS))]
    assert all(
        total is buffer
        for total, buffer in zip(totals, sums.total_after(leaf).buffers, strict=True)
    )
    return [total.clone() for total in totals]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32])
def test_pairwise_sums_are_one_binary_tree(count: int) -> None:
    sums = PartialSums(lambda: FlatGradients(LAYOUTS), pairwise=True)
    values = leaves(count)
    for _ in range(2):  # the second time with old values in the buffers
        sets: set[int] = set()
        found = summed(sums, values, sets)
        for bucket, total in enumerate(found):
            assert torch.equal(total, tree([value[bucket] for value in values]))
        sums.clear()
    assert len(sets) <= count.bit_length()


def test_pairwise_sum_of_halves() -> None:
    values = [value[0] for value in leaves(8)]
    assert torch.equal(tree(values), tree([tree(values[:4]), tree(values[4:])]))
    assert not torch.equal(tree(values), chain(values))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_without_pairwise_microbatches_are_added_in_order(count: int) -> None:
    sums = PartialSums(lambda: FlatGradients(LAYOUTS), pairwise=False)
    values = leaves(count)
    sets: set[int] = set()
    found = summed(sums, values, sets)
    for bucket, total in enumerate(found):
        expected = chain([value[bucket] for value in values])
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    assert len(sets) <= 2
