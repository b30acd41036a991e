"""Operands and products, compared with a float64 oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distmp.quantization.operands import (
    FORMATS,
    Counts,
    LayerCounts,
    Operand,
    power_of_two_scales,
    quantize,
    round_stochastically,
    round_to_nearest,
)
from distmp.quantization.products import emulated_product, scaled_product
from tests.quantization import oracle

SCALINGS = {"tensor": "e4m3", "row": "e4m3", "block32": "e4m3", "block16": "e2m1"}
EACH = pytest.mark.parametrize(("scaling", "name"), SCALINGS.items())


@st.composite
def matrices(
    draw: st.DrawFn, columns: int | None = None, exponents: tuple[int, int] = (-130, 90)
) -> Tensor:
    """Draw matrices in bfloat16 with large, tiny, subnormal and zero values, and rows of zeros."""
    rows = draw(st.integers(1, 9))
    columns = columns or draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    low = draw(st.integers(*exponents))
    spread = draw(st.integers(0, 30))
    powers = torch.randint(low, low + spread + 1, (rows, columns), generator=generator)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    matrix = (values * torch.exp2(powers.double())).bfloat16()
    if draw(st.booleans()):
        matrix[torch.rand(rows, generator=generator) < 0.3] = 0
    return matrix


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 7, (rows, columns), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * spread).bfloat16()


@EACH
@settings(max_examples=25, deadline=None)
@given(matrix=matrices())
def test_operand_values_agree_with_oracle(scaling: str, name: str, matrix: Tensor) -> None:
    operand = quantize(matrix, name, scaling)
    expected = oracle.dequantized(matrix, name, scaling)
    # FP32 and bfloat16 do not represent what is below their subnormal numbers.
    torch.testing.assert_close(oracle.restored(operand).double(), expected, rtol=0, atol=2.0**-149)


@EACH
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_matmuls_are_exact_except_fp32_sums(scaling: str, name: str, data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 40))
    # FP32 has to represent the sums.
    a, b = (data.draw(matrices(columns, exponents=(-60, 20))) for _ in range(2))
    first, second = quantize(a, name, scaling), quantize(b, name, scaling)
    product = emulated_product(first, second).double()
    x, y = (oracle.dequantized(each, name, scaling) for each in (a, b))
    exact, terms = x @ y.t(), x.abs() @ y.abs().t()
    assert ((product - exact).abs() <= columns * 2.0**-24 * terms + 2.0**-120).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@EACH
def test_non_finite_value_makes_its_row_nan(scaling: str, name: str, value: float) -> None:
    a, b = random(4, 64), random(5, 64, seed=1)
    a[1, 3] = value
    product = emulated_product(quantize(a, name, scaling), quantize(b, name, scaling))
    assert product[1].isnan().all()
    if scaling != "tensor":  # the scale of the others does not depend on it
        assert product[[0, 2, 3]].isfinite().all()


@EACH
def test_transposed_weight_has_equal_values(scaling: str, name: str) -> None:
    if scaling == "row":
        pytest.skip("scales of rows cannot be transposed")
    operand = quantize(random(70, 48), name, scaling, square=True)
    assert torch.equal(oracle.restored(operand.transposed()), oracle.restored(operand).t())


@EACH
def test_operand_statistics_agree_with_values(scaling: str, name: str) -> None:
    matrix = random(20, 64)
    matrix[0, 0], matrix[1, 0], matrix[2, 0] = math.inf, math.nan, -math.inf
    matrix[3, 1], matrix[3, 2], matrix[4] = 1e-20, -1e-20, 0.0
    counts = LayerCounts(torch.zeros(2, 4, dtype=torch.float64))
    operand = quantize(matrix, name, scaling, counts=Counts(counts, 1))
    assert counts.values[0].tolist() == [0, 0, 0, 0]
    _, saturated, underflowed, elements = counts.values[1].tolist()
    assert saturated >= 3
    assert scaling == "tensor" or saturated == 3
    finite = matrix.isfinite()
    lost = (operand.values == 0) & (matrix != 0) & finite
    assert underflowed == lost.sum().item() >= 2
    assert elements == matrix.numel()


def _agree(a: Operand, b: Operand) -> None:
    exact = emulated_product(a, b)
    kernel = scaled_product(a, b).float()
    if kernel.is_cuda:
        # Tensor cores of Hopper sum some products with fewer bits than FP32.
        rounding = 2.0**-9 if a.outer.numel() > 1 else 0.0
        assert (kernel - exact).norm() <= (2.0**-11 + rounding) * exact.norm()
    elif a.outer.numel() > 1:  # this kernel rounds to bfloat16
        exact = exact.bfloat16().float()
        difference = (kernel - exact).abs()
        # A sum in another order may fall on the other side of a tie.
        assert (difference <= exact.abs() * 2.0**-7 + 1e-6 * exact.abs().max()).all()
        assert (difference > 0).float().mean() < 0.01
    else:
        assert (kernel - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("names", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_torch_kernel_agrees_on_cpu(scaling: str, names: tuple[str, str]) -> None:
    a, b = random(48, 64), random(32, 64, seed=1)
    _agree(quantize(a, names[0], scaling), quantize(b, names[1], scaling))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_products_by_e5m2_are_emulated(name: str) -> None:
    a, b = quantize(random(48, 64), name, "row"), quantize(random(32, 64, seed=1), "e5m2", "row")
    assert torch.equal(scaled_product(a, b), emulated_product(a, b))  # GPUs have no kernel


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("names", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_torch_kernel_agrees_on_gpu(scaling: str, names: tuple[str, str]) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    a, b = random(1040, 2048).cuda(), random(512, 2048, seed=1).cuda()
    _agree(quantize(a, names[0], scaling), quantize(b, names[1], scaling))


@EACH
def test_operand_scale_keeps_relative_error(scaling: str, name: str) -> None:
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    limit = {"e4m3": 0.03, "e2m1": 0.12}[name]
    for factor in (2.0**-100, 1.0, 2.0**100):
        scaled = (matrix.double() * factor).bfloat16()
        error = (oracle.restored(quantize(scaled, name, scaling)).double() - scaled.double()).norm()
        assert error < limit * scaled.double().norm()
        assert error > 0


@EACH
def test_bfloat16_matmul_is_rounded_once(scaling: str, name: str) -> None:
    a, b = random(48, 1024), random(32, 1024, seed=1)
    first, second = quantize(a, name, scaling), quantize(b, name, scaling, square=True)
    product = emulated_product(first, second, torch.bfloat16)
    assert product.dtype == torch.bfloat16
    exact = oracle.restored(first).double() @ oracle.restored(second).double().t()
    bound = exact.abs() * 2.0**-8 + 1e-5 * exact.abs().max()
    assert ((product.double() - exact).abs() <= bound).all()


# Rounding to low-precision formats, compared with an oracle that enumerates their numbers.


NAMES = tuple(FORMATS)
FLOATS = st.one_of(
    st.floats(width=32, allow_subnormal=True),
    st.floats(-500, 500, width=32),
    st.floats(-(2**-5), 2**-5, width=32),
    st.sampled_from(oracle.numbers("e5m2") + oracle.numbers("e4m3")),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=20))
def test_values_are_rounded_to_nearest(name: str, values: list[float]) -> None:
    result = round_to_nearest(torch.tensor(values, dtype=torch.float32), FORMATS[name])
    expected = torch.tensor([oracle.rounded(value, name) for value in values])
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_ties_and_representable_numbers_agree_with_oracle(name: str) -> None:
    known = oracle.numbers(name)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(known)]
    values = torch.tensor([*known, *middles])
    expected = torch.tensor([oracle.rounded(value.item(), name) for value in values])
    assert torch.equal(round_to_nearest(values, FORMATS[name]), expected)
    assert torch.equal(round_to_nearest(-values, FORMATS[name]), -expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_rounding_agrees_with_torch_for_every_bfloat16(name: str) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = patterns.view(torch.bfloat16).float()
    values = values[values.isfinite()]
    of = FORMATS[name]
    by_torch = values.clamp(-of.largest, of.largest).to(of.dtype).float()
    assert torch.equal(round_to_nearest(values, of).view(torch.int32), by_torch.view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_torch_dtype_stores_all_numbers(name: str) -> None:
    values = torch.tensor(oracle.numbers(name))
    assert torch.equal(values.to(FORMATS[name].dtype).float(), values)
    assert torch.equal(values.bfloat16().float(), values)


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    largest = FORMATS[name].largest
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(200_000, generator=generator)
    for value in (0.3, -0.3, 0.9 * largest, 3 * 2.0 ** (FORMATS[name].smallest_exponent - 3)):
        result = round_stochastically(torch.full_like(uniform, value), FORMATS[name], uniform)
        below, above = oracle.neighbours(abs(value), name)
        assert set(result.abs().tolist()) <= {below, above}
        error = result.double().mean().item() - torch.tensor(value).item()
        assert abs(error) <= 5 * (above - below) / math.sqrt(len(uniform))


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_keeps_representable_numbers_and_limits(name: str) -> None:
    values = torch.tensor([*oracle.numbers(name), math.inf, math.nan, 1e30])
    values = torch.cat([values, -values])
    for uniform in (torch.zeros_like(values), torch.full_like(values, 1 - 2**-24)):
        result = round_stochastically(values, FORMATS[name], uniform)
        expected = values.clamp(-FORMATS[name].largest, FORMATS[name].largest)
        expected = torch.where(values.isfinite(), expected, math.nan)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        finite = values.isfinite()
        assert torch.equal(result[finite].signbit(), values[finite].signbit())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(largest=st.one_of(st.floats(0, 2.0**126, width=32), st.sampled_from([448.0, 6.0, 57344.0])))
def test_scale_is_smallest_power_of_two_without_saturation(name: str, largest: float) -> None:
    scale = power_of_two_scales(torch.tensor(largest, dtype=torch.float32), FORMATS[name]).item()
    assert scale == oracle.power_of_two(largest, name)


def test_zero_and_non_finite_magnitudes_have_scale_1() -> None:
    values = torch.tensor([0.0, math.inf, math.nan])
    assert power_of_two_scales(values, FORMATS["e4m3"]).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("name", "limit"), [("e4m3", 464.0), ("e5m2", 61440.0), ("e2m1", 7.0)])
def test_saturation_threshold_agrees_with_format(name: str, limit: float) -> None:
    assert FORMATS[name].saturates_from == limit
