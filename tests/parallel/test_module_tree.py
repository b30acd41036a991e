from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from distmp.parallel.module_buffers import ModuleTree


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.ReLU()))


def swap_buffers(module: nn.Module) -> None:
    buffers = module[1]._buffers  # type: ignore[index]
    buffers["running_mean"], buffers["running_var"] = (
        buffers["running_var"],
        buffers["running_mean"],
    )


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a parameter replaced": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 2))),
    "a parameter added": lambda m: m[2].register_parameter("new", nn.Parameter(torch.ones(1))),
    "a parameter removed": lambda m: delattr(m[0], "bias"),
    "a buffer replaced": lambda m: setattr(m[1], "running_mean", torch.ones(3)),
    "a buffer added": lambda m: m[2].register_buffer("new", None),
    "buffers swapped": swap_buffers,
    "a module added": lambda m: m[2].append(nn.ReLU()),
    "a module replaced": lambda m: m[2].__setitem__(0, nn.ReLU()),
    "a module removed": lambda m: m[2].pop(0),
    "another dtype of buffers": lambda m: m.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_is_noticed(change: Callable[[nn.Sequential], object]) -> None:
    module = model()
    tree = ModuleTree(module)
    module(torch.ones(4, 2)).sum().backward()
    with torch.no_grad():
        module[0].weight += 1
    assert tree.is_unchanged()
    change(module)
    assert not tree.is_unchanged()
    assert ModuleTree(module).is_unchanged()
