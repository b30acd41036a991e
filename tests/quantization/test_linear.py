"""The three products of a low-precision linear layer, compared with a float64 oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.precision import policy
from distmp.quantization.layers import low_precision_layers
from distmp.quantization.linear import (
    GRAD,
    INPUT,
    OPERANDS,
    WEIGHT,
    WGRAD_GRAD,
    WGRAD_INPUT,
    LowPrecisionState,
    ProductFormats,
    hadamard,
    low_precision_linear,
    random_transform,
)
from distmp.quantization.operands import quantize
from tests.marks import nightly
from tests.quantization import oracle

TOKENS, INPUTS, OUTPUTS = 50, 64, 96
FP8 = ProductFormats("e4m3", "e5m2", "e5m2", "tensor")
ROW = ProductFormats("e4m3", "e4m3", "e4m3", "row")
MX = ProductFormats("e4m3", "e4m3", "e4m3", "block32")
NVFP4 = ProductFormats("e2m1", "e2m1", "e2m1", "block16")
WIDE = ProductFormats(None, None, None)


def state(formats: ProductFormats) -> LowPrecisionState:
    return LowPrecisionState(
        formats, torch.zeros(len(OPERANDS), 4, dtype=torch.float64), torch.tensor(1)
    )


def tensors(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight, bias and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return draw(tokens, INPUTS), draw(OUTPUTS, INPUTS) / 8, draw(OUTPUTS), draw(tokens, OUTPUTS)


def run(
    formats: ProductFormats | LowPrecisionState, tokens: int = TOKENS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, dx, dw and db."""
    x, weight, bias, dy = tensors(tokens)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    of = formats if isinstance(formats, LowPrecisionState) else state(formats)
    y = low_precision_linear(x, weight, bias, of)
    y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves)  # type: ignore[return-value]


def assert_rounded_once(result: Tensor, exact: Tensor) -> None:
    """Check that a bfloat16 result is the float64 one up to FP32 sums and one rounding."""
    assert result.dtype == torch.bfloat16
    bound = exact.abs() * 2.0**-8 + 1e-5 * exact.abs().max()
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("formats", [FP8, WIDE], ids=["tensor", "wide"])
def test_autocast_changes_no_bits(formats: ProductFormats) -> None:
    expected = run(formats)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(formats)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("formats", [FP8, nightly(MX)], ids=["tensor", "block32"])
def test_matmuls_use_rounded_operands(formats: ProductFormats) -> None:
    x, weight, bias, dy = tensors()
    y, dx, dw, db = run(formats)

    def rounded(matrix: Tensor, name: str | None, weights: bool = False) -> Tensor:
        assert name is not None
        if weights and formats.scaling == "block32":  # square blocks
            blocks = matrix.view(3, 32, 2, 32).permute(0, 2, 1, 3).reshape(6, 1024)
            whole = torch.cat([oracle.dequantized(b[None], name, "tensor") for b in blocks])
            return whole.view(3, 2, 32, 32).permute(0, 2, 1, 3).reshape(OUTPUTS, INPUTS)
        return oracle.dequantized(matrix, name, formats.scaling)

    w = rounded(weight, "e4m3", weights=True)
    assert_rounded_once(y, rounded(x, "e4m3") @ w.t() + bias.double())
    assert_rounded_once(dx, rounded(dy, formats.grad) @ w)
    # Blocks are along the tokens; a scale of the padding changes nothing.
    padded = F.pad(dy, (0, 0, 0, 14)).t(), F.pad(x, (0, 0, 0, 14)).t()
    exact = rounded(padded[0], formats.wgrad) @ rounded(padded[1], "e4m3").t()
    assert_rounded_once(dw, exact)
    torch.testing.assert_close(db, dy.double().sum(0).bfloat16(), rtol=0.01, atol=0.02)


def test_row_scales_are_multiplied_into_gradient() -> None:
    x, weight, bias, dy = tensors()
    y, dx, dw, _ = run(ROW)
    w = torch.cat([oracle.dequantized(row[None], "e4m3", "tensor") for row in weight])

    def rows(matrix: Tensor) -> Tensor:
        return torch.cat([oracle.dequantized(row[None], "e4m3", "tensor") for row in matrix])

    assert_rounded_once(y, rows(x) @ w.t() + bias.double())
    scales = torch.tensor([oracle.power_of_two(row.abs().max().item(), "e4m3") for row in weight])
    assert len(scales.unique()) > 1
    assert_rounded_once(dx, rows(dy.double() * scales) @ (w / scales[:, None]))
    assert_rounded_once(dw, rows(dy.t()) @ rows(x.t()).t())


def test_full_precision_matmuls_agree_with_torch() -> None:
    x, weight, bias, dy = (each.requires_grad_() for each in tensors())
    y, dx, dw, _ = run(WIDE)
    expected = F.linear(x, weight, bias)
    expected.backward(dy)
    assert torch.equal(y, expected)
    assert torch.equal(dx, x.grad)  # type: ignore[arg-type]
    assert torch.equal(dw, weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("formats", "changed"),
    [
        (ProductFormats("e4m3", None, None), (True, False, False)),
        (ProductFormats(None, "e5m2", None), (False, True, False)),
        (ProductFormats(None, None, "e5m2"), (False, False, True)),
    ],
)
def test_each_matmul_has_its_format(
    formats: ProductFormats, changed: tuple[bool, bool, bool]
) -> None:
    different = [
        not torch.equal(a, b) for a, b in zip(run(formats)[:3], run(WIDE)[:3], strict=True)
    ]
    assert tuple(different) == changed


@pytest.mark.nightly
def test_4_bit_gradients_are_unbiased() -> None:
    """Random rounding of dy has dy as its mean, so the mean of dx is that without rounding dy."""
    x, weight, _, dy = tensors()
    of = state(ProductFormats(None, "e2m1", None, "block16"))
    total = torch.zeros(TOKENS, INPUTS, dtype=torch.float64)
    repetitions = 400
    for key in range(repetitions):
        of.key.fill_(key * 77_777)
        leaf = x.clone().requires_grad_()
        low_precision_linear(leaf, weight, None, of).backward(dy)
        assert leaf.grad is not None
        total += leaf.grad.double()
    w = oracle.restored(quantize(weight, "e2m1", "block16", square=True)).double()
    exact = dy.double() @ w
    single = (leaf.grad.double() - exact).norm() / exact.norm()
    error = (total / repetitions - exact).norm() / exact.norm()
    assert single > 0.05
    assert error < 2 * single / repetitions**0.5


@pytest.mark.nightly
def test_nvfp4_transforms_operands_of_weight_gradient() -> None:
    x, weight, _, dy = tensors(64)
    of = state(ProductFormats(None, None, "e2m1", "block16"))
    total = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
    repetitions = 400
    for key in range(repetitions):
        of.key.fill_(key * 77_777)
        leaf = weight.clone().requires_grad_()
        low_precision_linear(x, leaf, None, of).backward(dy)
        assert leaf.grad is not None
        total += leaf.grad.double()
    transformed = hadamard(x.float(), of.transform).t()
    x_rounded = oracle.dequantized(transformed, "e2m1", "block16")
    exact = hadamard(dy.float(), of.transform).double().t() @ x_rounded.t()
    single = (leaf.grad.double() - exact).norm() / exact.norm()
    error = (total / repetitions - exact).norm() / exact.norm()
    assert error < 2 * single / repetitions**0.5


def test_hadamard_transform_is_orthogonal_and_spreads_outliers() -> None:
    transform = random_transform(torch.device("cpu"))
    assert torch.equal(transform @ transform.t(), torch.eye(16))
    x = tensors(64)[0].float()
    x[::16] *= 30

    def peak(matrix: Tensor) -> Tensor:
        blocks = matrix.view(4, 16, INPUTS)
        return (blocks.abs().amax(1) / blocks.square().mean(1).sqrt()).mean()

    assert peak(hadamard(x, transform)) < 0.5 * peak(x)


def test_hadamard_transform_does_not_depend_on_the_default_dtype() -> None:
    expected = random_transform(torch.device("cpu"))
    torch.set_default_dtype(torch.float64)
    try:
        found = random_transform(torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_random_numbers_depend_only_on_key() -> None:
    of = state(NVFP4)
    first, second = run(of), run(of)
    of.key.fill_(2)
    third = run(of)
    for index in (1, 2):
        assert torch.equal(first[index], second[index])
        assert not torch.equal(first[index], third[index])
    assert torch.equal(first[0], third[0])  # forward rounds to nearest


@pytest.mark.nightly
@pytest.mark.parametrize("formats", [FP8, ROW, MX, NVFP4], ids=lambda f: f.scaling)
def test_compiled_layers_compute_equal_bits(formats: ProductFormats) -> None:
    x, weight, _, dy = tensors()
    results = []
    for compiled in (False, True):
        of = state(formats)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]

        def layer(x: Tensor, weight: Tensor, of: LowPrecisionState = of) -> Tensor:
            return low_precision_linear(x, weight, None, of)

        run_layer = torch.compile(layer, backend="aot_eager") if compiled else layer
        y = run_layer(*leaves) + run_layer(*leaves)  # two calls before backward
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves), of.counts.values])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)
    torch.compiler.reset()


def test_compiled_layer_follows_format_changes() -> None:
    x, weight, bias, _ = tensors()
    of = state(FP8)
    compiled = torch.compile(lambda: low_precision_linear(x, weight, bias, of), backend="eager")
    low_precision = compiled()
    of.formats = WIDE
    assert torch.equal(compiled(), F.linear(x, weight, bias))
    of.formats = FP8
    assert torch.equal(compiled(), low_precision)
    torch.compiler.reset()


def test_statistics_of_step_agree_with_tensors() -> None:
    of = state(FP8)
    run(of)
    counts = of.counts.values
    x, weight, _, dy = tensors()
    assert counts[INPUT, 0] == x.abs().max()
    assert counts[WEIGHT, 0] == weight.abs().max()
    assert counts[GRAD, 0] == counts[WGRAD_GRAD, 0] == dy.abs().max()
    assert counts[INPUT, 3] == x.numel()
    assert counts[WEIGHT, 3] == weight.numel()
    assert counts[WGRAD_INPUT, 3] == 64 * INPUTS  # padded to a multiple of 16 tokens
    with torch.no_grad():
        low_precision_linear(x, weight, None, of)
    assert torch.equal(of.counts.values, counts)


@pytest.mark.parametrize("shape", [(32,), (4, 32), (2, 3, 32)])
def test_result_is_not_a_view(shape: tuple[int, ...]) -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    low_precision_layers(layer, policy("fp8"), [], torch.device("cpu"))
    result = layer(torch.ones(shape, requires_grad=True))
    assert not result._is_view()
    assert result.shape == shape


@pytest.mark.parametrize("text", ["fp8", "fp8,grad=bf16", "mxfp8,wgrad=bf16"])
def test_second_derivatives_are_refused(text: str) -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    low_precision_layers(layer, policy(text), [], torch.device("cpu"))
    x = torch.ones(4, 32, requires_grad=True)
    with pytest.raises(ConfigError, match="low-precision matmuls have no second derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_layer_accepts_torch_call_signature() -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    low_precision_layers(layer, policy("fp8"), [], torch.device("cpu"))
    x = torch.ones(4, 32)
    assert torch.equal(layer[0](input=x), layer(x))


def test_function_transforms_are_refused() -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    low_precision_layers(layer, policy("fp8"), [], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.vmap(layer)(torch.ones(2, 4, 32))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: layer(x).sum())(torch.ones(4, 32))


def test_new_engine_replaces_formats_of_earlier_one() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    first = low_precision_layers(model, policy("fp8"), [], torch.device("cpu"))
    second = low_precision_layers(model, policy("mxfp8"), [], torch.device("cpu"))
    assert first is not None
    assert second is not None
    model(torch.ones(4, 32))
    assert first.counts.sum() == 0 < second.counts.sum()
    low_precision_layers(model, policy("bf16"), [], torch.device("cpu"))
    assert "forward" not in vars(model[0])
