from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distmp.utils.host_copy import moved
from tests.recording import no_waiting


class Pair(NamedTuple):
    tokens: Tensor
    name: str


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [ONE, (ONE, 3), [ONE, [ONE]], {"a": ONE, "b": {"c": (ONE, None)}}, Pair(ONE, "x"), "text"],
    ids=lambda batch: type(batch).__name__,
)
def test_all_tensors_of_a_batch_are_moved_and_nothing_else_changes(batch: Any) -> None:
    found = moved(batch, torch.device("meta"))
    leaves, structure = pytree.tree_flatten(batch)
    after, same = pytree.tree_flatten(found)
    assert structure == same
    for before, leaf in zip(leaves, after, strict=True):
        assert leaf.is_meta if isinstance(before, Tensor) else leaf == before


@pytest.mark.gpu
def test_pinned_batches_are_moved_without_waiting() -> None:
    expected = torch.arange(6.0)
    pinned = [expected.pin_memory(), (expected + 1).pin_memory()]
    with no_waiting():
        found = [tensor + 0 for tensor in moved(pinned, torch.device("cuda"))]
    for index, tensor in enumerate(found):
        assert torch.equal(tensor.cpu(), expected + index)
    # An engine on the CPU may be given batches of a GPU.
    assert torch.equal(moved(found[1], torch.device("cpu")), expected + 1)
