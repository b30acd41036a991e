"""Attribution names the narrow product with the first value that is not finite."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from distmp.diagnosis.attribution import OverflowReport
from distmp.engine import Engine
from tests.ranks import ranks
from tests.reference import fused_adamw

WIDTH = 16


class Batch(NamedTuple):
    inputs: Tensor
    factor: float = 1.0  # not a tensor, so the batch itself is finite
    slope: float = 1.0


class Sloped(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.slope = slope
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.slope, None


class Model(nn.Module):
    """Multiplies activations and gradients between its second and its third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: Batch) -> Tensor:
        x = self.layers[0](batch.inputs)
        x = Sloped.apply(self.layers[1](x), batch.slope)
        return self.head(self.layers[2](x * batch.factor))


def total(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return model(batch).sum(), len(batch.inputs)


def make_engine(model: nn.Module | None = None, policy: str = "fp8", **options: Any) -> Engine:
    torch.manual_seed(0)
    model = Model() if model is None else model
    return Engine(model, total, fused_adamw, policy=policy, device="cpu", **options)


def explained(engine: Engine, batch: Batch) -> OverflowReport:
    """Return the report on a step whose second microbatch on the last rank is `batch`."""
    last = engine.world.rank == engine.world.world_size - 1
    good = Batch(torch.ones(4, WIDTH))
    report = engine.explain(engine.step([good, batch if last else good]))
    assert report is not None
    return report


BAD = Batch(torch.ones(4, WIDTH), factor=math.inf)
STEEP = Batch(torch.ones(4, WIDTH), slope=math.inf)


@pytest.mark.parametrize("policy", ["fp8", "fp8-rowwise", "mxfp8,hp=head|*.0", "nvfp4,hp=head"])
@pytest.mark.parametrize(
    ("batch", "layer", "product", "where"),
    [
        (BAD, "layers.2", "forward", "first at the input of 'layers.2', in the forward product of"),
        (STEEP, "layers.1", "grad", "in the gradient of 'layers.1.weight' (0 inf, 256 NaN), in"),
    ],
)
def test_an_operand_that_is_not_finite(
    policy: str, batch: Batch, layer: str, product: str, where: str
) -> None:
    width = 32 if "mxfp8" in policy else 16
    engine = make_engine(Wide() if width == 32 else None, policy)
    inputs = torch.ones(4, width)
    outcome = engine.step([Batch(inputs), batch._replace(inputs=inputs)])
    report = engine.explain(outcome)
    assert report is not None
    assert (report.layer, report.product, report.microbatch) == (layer, product, 1)
    assert where.replace("256", str(width**2)) in report.diagnosis
    assert f"product of '{layer}' (e" in report.diagnosis
    assert report.to_record()["product"] == product


class Wide(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.head = nn.Linear(32, 1)


def test_a_result_beyond_the_compute_dtype() -> None:
    model = Model()
    with torch.no_grad():
        model.layers[1].weight.fill_(1e30)
    report = explained(make_engine(model), Batch(torch.full((4, WIDTH), 1e30)))
    assert (report.cause, report.layer, report.product) == ("forward", "layers.1", "forward")
    assert "in the forward product of 'layers.1' (e4m3) the result is not finite" in str(report)


def test_the_gradient_of_the_weight_beyond_the_compute_dtype() -> None:
    batch = Batch(torch.full((4, WIDTH), 1e30), factor=1e-25, slope=1e38)
    report = explained(make_engine(policy="fp8,grad=bf16"), batch)
    assert (report.cause, report.layer, report.product) == ("backward", "layers.1", "wgrad")
    assert "in the wgrad product of 'layers.1' (e5m2) the result is not finite" in str(report)


class Steeper(Model):
    def forward(self, batch: Batch) -> Tensor:
        return 64 * super().forward(batch)


def filled(model: Model, *weights: float) -> Model:
    """Give the layers of a model, and then its head, weights with one value each."""
    with torch.no_grad():
        for layer, weight in zip((*model.layers, model.head), weights, strict=True):
            layer.weight.fill_(weight)
    return model


@pytest.mark.parametrize("policy", ["fp8", "fp8-rowwise", "nvfp4,hp=head", "fp8,wgrad=bf16"])
def test_the_gradient_of_the_input_beyond_the_compute_dtype(policy: str) -> None:
    engine = make_engine(filled(Model(), 1.0, 2.0**30, 1.0, 1.0), policy)
    report = explained(engine, Batch(torch.ones(4, WIDTH), slope=2.0**100))
    assert (report.cause, report.layer, report.product) == ("backward", "layers.1", "grad")
    number_format = "e2m1" if "nvfp4" in policy else "e4m3" if "rowwise" in policy else "e5m2"
    where = f", in the grad product of 'layers.1' ({number_format}) the result is not finite"
    assert report.diagnosis.startswith("the loss is finite, but its gradient is not")
    assert "; first in the gradient of 'layers.0.weight' (" in report.diagnosis
    assert where in report.diagnosis
    wide = make_engine(filled(Model(), 1.0, 2.0**30, 1.0, 1.0), "fp8,grad=bf16,wgrad=bf16")
    report = explained(wide, Batch(torch.ones(4, WIDTH), slope=2.0**100))
    assert (report.cause, report.layer, report.module) == ("backward", None, "layers.0")


def test_a_result_after_the_gradient_of_another_module_is_not_the_cause() -> None:
    # The head's input is 2^126, and the gradient of its weight several times as large. Then the
    # result of grad of layers.1 is above 2^130.
    engine = make_engine(filled(Steeper(), 2.0**-14, 2.0**60, 2.0**60, 2.0**-126))
    report = explained(engine, Batch(torch.ones(4, WIDTH), factor=2.0**8, slope=2.0**120))
    assert (report.cause, report.module, report.layer) == ("backward", "head", None)
    assert report.microbatch == 1
    names = [overflow.name for overflow in report.parameters]
    assert names == ["head.weight", "layers.0.weight"]


@pytest.mark.parametrize("policy", ["fp8,hp=layers.*", "bf16", "fp8,forward=bf16"])
def test_what_is_wide_is_not_named(policy: str) -> None:
    model = Model()
    model.head = nn.Linear(WIDTH, WIDTH)  # narrow in the first case
    report = explained(make_engine(model, policy), BAD)
    assert (report.cause, report.module) == ("forward", "layers.2")
    assert (report.layer, report.product) == (None, None)


def test_a_bad_batch_remains_the_cause() -> None:
    report = explained(make_engine(), Batch(torch.full((4, WIDTH), math.nan)))
    assert (report.cause, report.layer, report.product) == ("bad_input", None, None)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(2)
def test_one_rank_and_one_microbatch(strategy: str) -> None:
    for batch, layer, product in ((BAD, "layers.2", "forward"), (STEEP, "layers.1", "grad")):
        report = explained(make_engine(strategy=strategy), batch)
        assert (report.layer, report.product) == (layer, product)
        assert (report.ranks, report.microbatch, report.one_rank_only) == ((1,), 1, True)
        assert f"product of '{layer}' (e" in report.diagnosis
        assert "on rank 1 of 2 only, microbatch 1" in report.diagnosis
