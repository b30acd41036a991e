from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.optim.build import optimizer_factory
from distmp.optim.optimizer_tensors import ELEMENTWISE, build_on_shards
from distmp.optim.settings import OptimizerConfig

SHAPES = {"matrix": torch.Size([4, 6]), "vector": torch.Size([6]), "far": torch.Size([8, 8])}


def shards() -> list[tuple[str, Tensor]]:
    """Ten elements of the matrix, the full vector, and no element of a third parameter."""
    sizes = {"matrix": 10, "vector": 6, "far": 0}
    return [(name, torch.linspace(1, 2, size).requires_grad_()) for name, size in sizes.items()]


def test_groups_are_chosen_by_whole_parameters() -> None:
    factory = optimizer_factory(OptimizerConfig(weight_decay=0.3))
    named = shards()
    optimizer = build_on_shards(factory, named, SHAPES)
    decayed, plain = optimizer.param_groups
    assert decayed["params"] == [named[0][1], named[2][1]]
    assert decayed["weight_decay"] == 0.3
    assert plain["params"] == [named[1][1]]
    assert plain["weight_decay"] == 0


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_shards_are_stepped_as_the_whole_would_be(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.1)

    named = shards()
    values = [shard.detach().clone().requires_grad_() for _, shard in named[:2]]
    sharded, plain = build_on_shards(factory, named, SHAPES), kind(values, lr=0.1)
    for step in range(3):
        for (_, shard), value in zip(named, values, strict=False):
            gradient = torch.cos(torch.arange(len(value)) + step)
            shard.grad, value.grad = gradient, gradient.clone()
        named[2][1].grad = torch.zeros(0)
        sharded.step()
        plain.step()
    for (_, shard), value in zip(named, values, strict=False):
        assert torch.equal(shard, value)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_look_at_whole_matrices_are_refused(name: str) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    matrices = [entry for entry in shards() if entry[0] != "vector"]
    with pytest.raises(ConfigError, match=rf"shard_optimizer.*{name} needs full parameters"):
        build_on_shards(lambda parameters: kind([p for _, p in parameters]), matrices, SHAPES)


class Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


class Normalized(torch.optim.SGD):
    """Divides each gradient by its norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


@pytest.mark.parametrize("kind", [Own, Normalized])
def test_an_unknown_optimizer_is_used_with_a_warning(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "distmp"):
        build_on_shards(kind, shards(), SHAPES)
    assert "this is correct only if it updates every element" in caplog.text


def test_an_optimizer_of_others_that_is_known_to_look_at_whole_parameters_is_refused() -> None:
    class FusedLAMB(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

    with pytest.raises(ConfigError, match="FusedLAMB needs full parameters"):
        build_on_shards(FusedLAMB, shards(), SHAPES)
