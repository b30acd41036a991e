"""Errors of narrow products, compared with plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from distmp.diagnosis.product_errors import Candidate, ProductErrors
from distmp.quantization import ProductFormats

CPU = torch.device("cpu")
FP8 = ProductFormats("e4m3", "e5m2", "e5m2")


def rounded(values: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
    """Round with torch's own FP8, scaled by the smallest power of two that does not saturate."""
    scale = 2.0 ** math.ceil(math.log2(float(values.abs().max()) / largest))
    return (values / scale).to(dtype).double() * scale


def relative(narrow: Tensor, exact: Tensor) -> float:
    return float((narrow - exact).norm() / exact.norm())


def operands(tokens: int = 32) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(16, 48)
    return layer, torch.randn(tokens, 16), torch.randn(tokens, 48)


def measured(
    layer: nn.Linear, x: Tensor, dy: Tensor, formats: ProductFormats = FP8
) -> ProductErrors:
    errors = ProductErrors({"a": Candidate(formats, {"layer": layer})}, CPU)
    with errors:
        layer(x.requires_grad_()).backward(dy)
    return errors


def test_the_errors_are_those_of_products_of_rounded_operands() -> None:
    layer, x, dy = operands()
    found = measured(layer, x, dy).errors(None)["a"]["layer"]
    x, weight, dy = (each.detach().double() for each in (x, layer.weight, dy))
    in_forward = [rounded(each, torch.float8_e4m3fn, 448.0) for each in (x, weight)]
    gradient = rounded(dy, torch.float8_e5m2, 57344.0)
    expected = [
        relative(in_forward[0] @ in_forward[1].t(), x @ weight.t()),
        relative(gradient @ in_forward[1], dy @ weight),
        relative(gradient.t() @ in_forward[0], dy.t() @ x),
    ]
    assert [each.error for each in found] == pytest.approx(expected, rel=1e-4)
    assert all(0.01 < each < 0.1 for each in expected)


def test_the_step_is_the_same_with_it() -> None:
    layer, x, dy = operands()
    measured(layer, x, dy)
    inside = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    layer(x).backward(dy)
    assert inside[0] is not None
    assert inside[1] is not None
    assert x.grad is not None
    assert layer.weight.grad is not None
    torch.testing.assert_close((x.grad, layer.weight.grad), inside, rtol=0, atol=0)


def test_errors_of_microbatches_are_those_of_all_values_together() -> None:
    layer, x, dy = operands()
    x.data[:16] *= 4.0  # the norms differ
    whole = measured(layer, x, dy, ProductFormats("e4m3", None, None, "row"))
    parts = ProductErrors(
        {"a": Candidate(ProductFormats("e4m3", None, None, "row"), {"layer": layer})}, CPU
    )
    with parts:
        for part in (slice(0, 16), slice(16, 32)):
            layer(x[part]).backward(dy[part])
    one, two = (each.errors(None)["a"]["layer"][0].error for each in (whole, parts))
    assert one == pytest.approx(two, rel=1e-6)


def test_values_that_round_to_zero_are_counted_for_their_products() -> None:
    layer, x, dy = operands()
    x.data[:, 0] = 1e-9
    forward, grad, wgrad = measured(layer, x, dy).errors(None)["a"]["layer"]
    count = layer.weight.numel() + x.numel()
    assert forward.underflowed == pytest.approx(32 / count, rel=0.2)
    assert grad.underflowed < 0.001
    assert wgrad.underflowed == pytest.approx(32 / (dy.numel() + x.numel()), rel=0.2)
    assert forward.saturated == 0


def test_not_finite_values_count_as_saturated() -> None:
    layer, x, dy = operands()
    x.data[0, 0] = math.inf
    forward, grad, _ = measured(layer, x, dy).errors(None)["a"]["layer"]
    assert forward.error is not None
    assert math.isnan(forward.error)
    assert forward.saturated > 0
    assert grad.saturated == 0


def test_a_frozen_weight_has_no_product_for_its_gradient() -> None:
    layer, x, dy = operands()
    layer.weight.requires_grad_(False)
    found = measured(layer, x, dy).errors(None)["a"]["layer"]
    assert [each.error is None for each in found] == [False, False, True]
