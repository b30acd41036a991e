from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distmp.errors import ConfigError
from distmp.optim.factories import optimizer_factory
from distmp.optim.optimizer_tensors import ELEMENTWISE, build_on, build_on_shards
from distmp.optim.settings import OptimizerConfig
from tests.ranks import ranks
from tests.reference import TWO_RANKS, make_engine, make_model, microbatches, weights

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
def test_optimizer_of_all_tensors_is_accepted(factory: Callable[[Any], Any]) -> None:
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
            r"optimizer = 'SGD': updates 1 tensors that the engine does not train "
            r"\(one of shape \(3,\)\), .*not on model.parameters\(\)",
        ),
        (lambda p: SGD(p[:1], lr=0.1), r"optimizer = 'SGD': does not step bias; put every"),
        (twice, r"optimizer = 'SGD': would update weight, bias more than once"),
        (
            SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
            r"optimizer = 'SGD': cannot be called with .* pass a function that builds it: lambda",
        ),
        (lambda: None, r"optimizer = '<lambda>': cannot be called with \[\(name, tensor\)"),
        (lambda p: None, r"optimizer = 'NoneType': the function returned this; return a torch"),
    ],
)
def test_invalid_optimizer_factory_is_one_message(factory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_on(factory, named())


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_optimizer_on_model_parameters_is_refused(policy: str) -> None:
    """It would update the 16-bit copies, which the master weights overwrite."""
    model = make_model()
    with pytest.raises(ConfigError, match="updates 11 tensors that the engine does not train"):
        make_engine(model=model, policy=policy, optimizer=lambda _: SGD(model.parameters(), lr=0.1))


def test_fp32_optimizer_updates_model_parameters() -> None:
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
def test_optimizer_that_replaces_memory_is_refused() -> None:
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


SHAPES = {"matrix": torch.Size([4, 6]), "vector": torch.Size([6]), "far": torch.Size([8, 8])}


def shards() -> list[tuple[str, Tensor]]:
    """Ten elements of the matrix, the full vector, and no element of a third parameter."""
    sizes = {"matrix": 10, "vector": 6, "far": 0}
    return [(name, torch.linspace(1, 2, size).requires_grad_()) for name, size in sizes.items()]


def test_groups_are_selected_by_whole_parameters() -> None:
    factory = optimizer_factory(OptimizerConfig(weight_decay=0.3))
    named = shards()
    optimizer = build_on_shards(factory, named, SHAPES)
    decayed, plain = optimizer.param_groups
    assert decayed["params"] == [named[0][1], named[2][1]]
    assert decayed["weight_decay"] == 0.3
    assert plain["params"] == [named[1][1]]
    assert plain["weight_decay"] == 0


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_sharded_updates_agree_with_whole_parameters(
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


@pytest.mark.parametrize("copied", [True, False])
def test_empty_group_of_copies_is_warned_of(copied: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    own = {*model.parameters()}
    named = [
        (name, value.detach().clone().requires_grad_() if copied else value)
        for name, value in model.named_parameters()
    ]

    def by_identity(named: Any) -> torch.optim.Optimizer:
        groups = [
            [value for _, value in named if (value in own) is there] for there in (False, True)
        ]
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)

    build_on(by_identity, named)
    assert ("a parameter group of SGD is empty" in caplog.text) is copied


@ranks(2)
def test_only_the_first_rank_warns_of_empty_group() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("distmp").addHandler(handler)

    def with_empty_group(named: Any) -> torch.optim.Optimizer:
        return SGD([{"params": [value for _, value in named]}, {"params": []}], lr=0.1)

    make_engine(policy="bf16", optimizer=with_empty_group)
    warnings = [record for record in records if "is empty" in record.getMessage()]
    assert len(warnings) == (dist.get_rank() == 0)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_whole_matrix_optimizers_are_refused_for_shards(name: str) -> None:
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
def test_unknown_optimizer_is_used_with_warning(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "distmp"):
        build_on_shards(kind, shards(), SHAPES)
    assert "this is correct only if it updates every element" in caplog.text


def test_external_whole_parameter_optimizer_is_refused() -> None:
    class FusedLAMB(Own): ...

    with pytest.raises(ConfigError, match="FusedLAMB needs full parameters"):
        build_on_shards(FusedLAMB, shards(), SHAPES)
