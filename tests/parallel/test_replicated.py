from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.build_strategy import build_strategy
from distmp.precision import policy
from tests.ranks import ranks
from tests.reference import (
    ONE_RANK,
    assert_same_bits,
    make_engine,
    make_model,
    sum_of_squares,
    train,
    weights,
)

ALONE = World(0, 1, torch.device("cpu"), None)


@ranks(2)
def test_ranks_start_with_the_weights_of_rank_0() -> None:
    import torch.distributed as dist

    model = nn.Sequential(make_model(seed=dist.get_rank()), nn.BatchNorm1d(5))
    model[1].register_buffer("mask", torch.full((3,), dist.get_rank() == 0))
    model[1].running_mean.fill_(dist.get_rank())
    make_engine(model=model)
    for found, expected in zip(model[0].parameters(), make_model(0).parameters(), strict=True):
        assert torch.equal(found, expected)
    assert model[1].mask.tolist() == [True] * 3
    assert model[1].running_mean.tolist() == [0] * 5


@ranks(2)
def test_ranks_start_with_values_of_rank_0_in_any_memory_format() -> None:
    import torch.distributed as dist

    model = nn.Conv2d(3, 2, 2).requires_grad_(False).to(memory_format=torch.channels_last)
    model.weight.fill_(dist.get_rank())
    strided = torch.full((3, 4), float(dist.get_rank()))[:, ::2]
    model.register_buffer("part", strided)
    model.register_parameter("frozen", nn.Parameter(strided.clone().t(), requires_grad=False))
    model.add_module("trained", nn.Linear(2, 1))
    make_engine(model=model, strategy="ddp")
    assert not any(value.any() for value in (model.weight, model.part, model.frozen))
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


# Parameters


def test_frozen_parameters_are_cast_and_not_updated() -> None:
    model = make_model()
    model.first.requires_grad_(False)
    before = [parameter.clone() for parameter in model.first.parameters()]
    engine = make_engine(model=model, policy="bf16")
    train(engine, 5, ONE_RANK)
    for parameter, old in zip(model.first.parameters(), before, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, old.bfloat16())
        assert parameter.grad is None
    trained_names = [
        name for group in engine.optimizer.param_groups for name in group["param_names"]
    ]
    assert trained_names == [name for name, p in model.named_parameters() if p.requires_grad]
    assert "model/first.weight" in engine.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_memory_format_changed_after_construction_is_restored(precision: str) -> None:
    engine, expected = make_engine(policy=precision), make_engine(policy=precision)
    for step in range(2):
        weight = engine.module.first.weight
        weight.data = weight.data.t().contiguous().t()
        for each in (engine, expected):
            train(each, 1, ONE_RANK, first=step)
    assert_same_bits(weights(engine), weights(expected))


def test_low_precision_parameters_are_converted_to_fp32_exactly() -> None:
    model = make_model().bfloat16()
    before = {name: value.float() for name, value in model.named_parameters()}
    engine = make_engine(model=model, policy="fp32")
    assert_same_bits(weights(engine), before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16"])
def test_conversion_of_parameters_that_share_memory_is_refused(precision: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ConfigError, match=r"policy = .*'0\.weight' and '1\.weight', which share"):
        build_strategy("single", model, policy(precision), ALONE)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16-autocast"])
def test_float64_parameters_are_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match=r"'first\.weight' is float64; convert .* \.float\(\)"):
        build_strategy("single", make_model().double(), policy(precision), ALONE)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = make_model()
        self.table = nn.Parameter(torch.arange(300), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)


class Parts(nn.Module):
    """Trains a part of the columns of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(4, 6)[:, :2])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.part


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_that_are_not_dense_are_updated(fused: bool) -> None:
    model, inputs = Parts(), torch.randn(5, 4)
    part = model.part.detach().clone()
    adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.0, fused=fused)
    engine = make_engine(model=model, loss=sum_of_squares, optimizer=adamw)
    engine.step([inputs])
    gradient = inputs.T @ inputs @ part
    torch.testing.assert_close(model.part.detach(), part - 0.1 * gradient.sign())


def test_parameters_whose_elements_alternate_in_memory_are_refused() -> None:
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    for layer, part in zip(model, torch.randn(4, 12).chunk(3, dim=1), strict=True):
        layer.weight = nn.Parameter(part)
    with pytest.raises(ConfigError, match=r"ModuleList': would separate '0\.weight' and '1\.weig"):
        make_engine(model=model)


def test_bucket_of_empty_parameters_with_dropped_microbatches() -> None:
    model = nn.Sequential(nn.Linear(1300, 1300))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    engine = make_engine(model=model, loss=sum_of_squares, on_nonfinite="drop_microbatch")
    assert not engine.step([torch.randn(1, 1300)]).numbers.skipped


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_integer_parameters_are_refused_where_they_would_be_rounded(precision: str) -> None:
    with pytest.raises(ConfigError, match=rf"'table' is int64; .* or use {precision}-autocast"):
        build_strategy("single", Counting(), policy(precision), ALONE)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_integer_parameters_stay_where_nothing_is_cast(precision: str) -> None:
    engine = make_engine(model=Counting(), policy=precision)
    assert not train(engine, 1, ONE_RANK)[0].skipped
    assert torch.equal(engine.module.table, torch.arange(300))


def test_policy_determines_which_tensors_the_optimizer_updates() -> None:
    for name in ("fp32", "bf16-autocast"):
        model = make_model()
        strategy = build_strategy("single", model, policy(name), ALONE)
        assert [id(value) for _, value in strategy.optimizer_parameters()] == [
            id(value) for value in model.parameters()
        ]
    model = make_model()
    strategy = build_strategy("single", model, policy("bf16"), ALONE)
    masters = dict(strategy.optimizer_parameters())
    assert list(masters) == [name for name, _ in model.named_parameters()]
    assert {master.dtype for master in masters.values()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_same_bits(masters, dict(make_model().named_parameters()))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_model_that_is_converted_later_is_refused(precision: str) -> None:
    engine = make_engine(policy=precision)
    train(engine, 1, ONE_RANK)
    engine.module.to(torch.float16 if precision == "fp16" else torch.bfloat16)
    with pytest.raises(ConfigError, match=r"was converted or moved together with its gradient"):
        train(engine, 1, ONE_RANK, first=1)
