from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils import _pytree as pytree

from distmp.utils.tensor_trees import checksum, map_tensors, set_extra_state

Pair = namedtuple("Pair", ["left", "right"])
ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    "tree",
    [
        ONE,
        torch.nn.Parameter(ONE),
        (),
        {},
        None,
        "text",
        (ONE, None, 3, [TWO, "text"]),
        {"a": ONE, "b": {"c": (TWO, 1.5)}, 0: True},
        Pair(ONE, [TWO]),
        [OrderedDict(b=ONE, a=TWO), torch.Size([2]), object],
    ],
)
def test_tree_map_agrees_with_pytree(tree: Any) -> None:
    def double(tensor: Tensor) -> Tensor:
        return 2 * tensor

    leaves, found_tree = pytree.tree_flatten(map_tensors(double, tree))
    expected_leaves, expected_tree = pytree.tree_flatten(pytree.tree_map_only(Tensor, double, tree))
    assert found_tree == expected_tree
    for found, expected in zip(leaves, expected_leaves, strict=True):
        if isinstance(expected, Tensor):
            assert torch.equal(found, expected)
        else:
            assert found is expected


def test_tree_map_does_not_change_containers() -> None:
    tree = {"a": [ONE]}
    assert map_tensors(lambda tensor: tensor.to(torch.bfloat16), tree)["a"][0].dtype != ONE.dtype
    assert tree["a"][0] is ONE


@pytest.mark.parametrize(
    "convert",
    [
        Tensor.to_sparse,
        lambda values: values.unsqueeze(0).to_sparse_csr(),
        lambda values: torch.nested.nested_tensor([values]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*beta state", "ignore:.*prototype stage")
def test_checksum_of_tensors_without_strides(convert: Any) -> None:
    assert checksum([convert(ONE)]) == checksum([convert(ONE.clone())]) != checksum([convert(TWO)])


def test_checksum_of_conjugate_views() -> None:
    values = torch.tensor([1 + 2j])
    assert checksum(values.conj()) == checksum(torch.tensor([1 - 2j])) != checksum(values)
    assert checksum(values.conj().imag) == checksum(torch.tensor([-2.0]))


def test_batches_of_tokenizers_are_containers() -> None:
    """transformers returns a `BatchEncoding`, which is a `UserDict`."""
    batch = UserDict({"ids": torch.ones(2), "nested": [torch.ones(1)], "text": "a"})
    doubled = map_tensors(lambda tensor: 2 * tensor, batch)
    assert type(doubled) is UserDict
    assert (doubled["ids"].tolist(), doubled["nested"][0].tolist()) == ([2, 2], [2])
    assert batch["ids"].tolist() == [1, 1]
    assert checksum(batch) != checksum(doubled)
    assert checksum(batch) == checksum(map_tensors(torch.clone, batch))


def test_extra_state_is_set_inside_of_wrappers() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return torch.tensor(0)

        def set_extra_state(self, state: Tensor) -> None:
            self.extra = state

    model = nn.Sequential(checkpoint_wrapper(Extra(1, 1)), Extra(1, 1))
    values = {f"{index}._extra_state": torch.tensor(index) for index in range(2)}
    set_extra_state(model, values)
    found = [part.extra.item() for part in model.modules() if type(part) is Extra]
    assert found == [0, 1]
