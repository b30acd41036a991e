from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distmp.errors import ConfigError
from distmp.optim.optimizer_tensors import build_on
from tests.ranks import ranks
from tests.reference import (
    TWO_RANKS,
    make_engine,
    make_model,
    microbatches,
    weights,
)

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def named() -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros(2, requires_grad=True)) for name in ("weight", "bias")]


def only_tensors(parameters: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in parameters]


@pytest.mark.parametrize(
    "factory",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(only_tensors(p), lr=0.1),
        lambda p: AdamW([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.0}]),
        AdamW,
    ],
)
def test_an_optimizer_of_all_tensors_is_taken(factory: Callable[[Any], Any]) -> None:
    parameters = named()
    optimizer = build_on(factory, parameters)
    updated = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    assert updated == {id(tensor) for _, tensor in parameters}


def twice(parameters: Any) -> torch.optim.Optimizer:
    optimizer = SGD(only_tensors(parameters), lr=0.1)
    optimizer.param_groups.append(dict(optimizer.param_groups[0]))  # torch refuses it otherwise
    return optimizer


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            lambda p: SGD([*only_tensors(p), torch.zeros(3, requires_grad=True)], lr=0.1),
            r"optimizer = 'SGD': steps 1 tensors that the engine does not train "
            r"\(one of shape \(3,\)\), .*not on model.parameters\(\)",
        ),
        (lambda p: SGD(p[:1], lr=0.1), r"optimizer = 'SGD': does not step bias; put every"),
        (twice, r"optimizer = 'SGD': would step weight, bias more than once"),
        (
            SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
            r"optimizer = 'SGD': cannot be called with .* pass a function that builds it: lambda",
        ),
        (lambda: None, r"optimizer = '<lambda>': cannot be called with \[\(name, tensor\)"),
        (lambda p: None, r"optimizer = 'NoneType': the function returned this; return a torch"),
    ],
)
def test_anything_else_is_one_message(factory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_on(factory, named())


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_an_optimizer_on_the_models_own_parameters_is_refused(policy: str) -> None:
    """It would step the 16-bit copies, which the master weights overwrite."""
    model = make_model()
    with pytest.raises(ConfigError, match="steps 11 tensors that the engine does not train"):
        make_engine(model=model, policy=policy, optimizer=lambda _: SGD(model.parameters(), lr=0.1))


def test_in_fp32_the_models_own_parameters_are_those_that_are_stepped() -> None:
    model = make_model()
    engine = make_engine(
        model=model, policy="fp32", optimizer=lambda _: SGD(model.parameters(), lr=0.1)
    )
    assert len(engine.optimizer.param_groups[0]["params"]) == 11


class Rebinds(torch.optim.SGD):
    """Writes no weight in place."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.data = tensor.data - group["lr"] * tensor.grad


@ranks(2)
def test_an_optimizer_that_replaces_memory_is_refused_where_its_update_would_be_lost() -> None:
    batches = microbatches(0, TWO_RANKS[0], dist.get_rank())
    for options in ({"policy": "bf16"}, {"shard_optimizer": True}, {"strategy": "fsdp"}):
        engine = make_engine(optimizer=lambda named: Rebinds(named, lr=0.1), **options)
        with pytest.raises(ConfigError, match=r"'Rebinds': replaces the memory of 'first\.weight'"):
            engine.step(batches)
    engine = make_engine(optimizer=lambda named: Rebinds(named, lr=0.1))
    expected = make_engine(optimizer=lambda named: SGD(named, lr=0.1))
    for one in (engine, expected):
        one.step(batches)
    torch.testing.assert_close(weights(engine), weights(expected), rtol=1e-6, atol=0)
