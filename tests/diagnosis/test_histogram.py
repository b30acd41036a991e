from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distmp.diagnosis import histogram
from distmp.diagnosis.histogram import ExponentHistogram, Shares, count_exponents

SCALES = (-40, -20, -3, 0, 1, 3, 8, 16, 24, 60, 100)


def histogram_of(values: Tensor) -> ExponentHistogram:
    return ExponentHistogram(count_exponents(values))


def shares_by_casting(values: Tensor, scale_exponent: int) -> Shares:
    """Count the results of torch's cast to float16."""
    known = values[values.isfinite() & (values != 0)]
    # float64 represents every product exactly. Rounding a product to float32 first would not change
    # whether it overflows or underflows in float16.
    halves = (known.double() * 2.0**scale_exponent).float().half()
    normal = torch.finfo(torch.float16).smallest_normal
    count = max(1, known.numel())
    return Shares(
        zero=int((halves == 0).sum()) / count,
        subnormal=int(((halves != 0) & (halves.abs() < normal)).sum()) / count,
        infinite=int(halves.isinf().sum()) / count,
    )


def near_float16_borders(size: int, seed: int) -> Tensor:
    """Values with random exponents, and fractions next to the rounding thresholds."""
    generator = np.random.default_rng(seed)
    borders = np.array([0, 1, 0x7FE000, 0x7FF000, 0x7FFFFF, 0x400000])
    fractions = (generator.choice(borders, size) + generator.integers(-2, 3, size)) % 2**23
    bits = generator.integers(0, 2, size) << 31 | generator.integers(0, 256, size) << 23 | fractions
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), scale=st.integers(-40, 100)
)
def test_shares_agree_with_casting_random_bits(values: list[int], scale: int) -> None:
    tensor = torch.from_numpy(np.array(values, dtype=np.uint32).view(np.float32))
    assert histogram_of(tensor).shares(scale) == shares_by_casting(tensor, scale)


@pytest.mark.parametrize("scale", SCALES)
def test_shares_agree_with_casting_at_borders(scale: int) -> None:
    values = near_float16_borders(200_000, seed=scale + 40)
    assert histogram_of(values).shares(scale) == shares_by_casting(values, scale)


@pytest.mark.parametrize("scale", [0, 16])
def test_shares_agree_at_each_single_border(scale: int) -> None:
    """In a mixture of values, two errors could cancel."""
    borders = [2.0**-25, 2.0**-24, 2.0**-14 - 2.0**-25, 2.0**-14, 65504.0, 65520.0, 65536.0]
    for border in borders:
        exact = torch.tensor(border / 2.0**scale)
        for value in (exact.nextafter(torch.tensor(0.0)), exact, exact.nextafter(exact * 2)):
            found = histogram_of(value).shares(scale)
            assert found == shares_by_casting(value.reshape(1), scale), (border, value.item())


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=100))
def test_exponents_agree_with_frexp(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    found = histogram_of(torch.from_numpy(array))
    known = array[np.isfinite(array) & (array != 0)]
    exponents, counts = np.unique(np.frexp(known)[1] - 1, return_counts=True)
    assert found.exponents == dict(zip(exponents.tolist(), counts.tolist(), strict=True))
    assert found.infinite == np.isinf(array).sum()
    assert found.nan == np.isnan(array).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_count_as_fp32(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert torch.equal(count_exponents(every), count_exponents(every.float()))
    known = histogram_of(every)
    assert sum(known.exponents.values()) + known.infinite + known.nan == 2**16 - 2  # without zeros
    assert known.infinite == 2


def test_histogram_is_independent_of_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    values = near_float16_borders(6000, seed=1).view(60, 100)
    whole = count_exponents(values)
    monkeypatch.setattr(histogram, "PIECE", 7)
    assert torch.equal(count_exponents(values.t()), whole)
    assert int(count_exponents(torch.zeros(0)).sum()) == 0
    assert int(count_exponents(torch.tensor(1.0)).sum()) == 1


def test_histograms_are_additive() -> None:
    values = near_float16_borders(1000, seed=2)
    total = histogram_of(values[:300]) + histogram_of(values[300:])
    assert total.exponents == histogram_of(values).exponents
    assert total.shares(5) == histogram_of(values).shares(5)


@pytest.mark.parametrize(
    ("largest", "smallest", "expected"),
    [
        (1.0, 2.0**-40, 2.0**12),  # 1 * 2^12 * 2^3 = 2^15
        (1.5, 2.0**-40, 2.0**12),
        (65504 / 2**15, 2.0**-40, 2.0**12),  # the largest float16 number
        (65520 / 2**15, 2.0**-40, 2.0**11),  # the next larger value is infinite
        (2.0**-20, 2.0**-60, 2.0**32),
        (2.0**20, 2.0**-40, 2.0**-8),  # a scale below 1, because 2^20 does not fit
        (1.0, 2.0**-14, 1.0),  # a larger scale gains nothing
        (1.0, 2.0**-17, 2.0**3),  # enough for every value to be normal
        (2.0**-5, 2.0**-5, 1.0),
    ],
)
def test_recommended_scale_agrees_with_expected(
    largest: float, smallest: float, expected: float
) -> None:
    values = torch.tensor([-largest, smallest, 0.0, math.inf, math.nan])
    assert histogram_of(values).recommended_scale() == expected


@settings(max_examples=200, deadline=None)
@given(exponents=st.lists(st.floats(-60, 30), min_size=1, max_size=30), margin=st.integers(0, 6))
def test_recommended_scale_is_optimal(exponents: list[float], margin: int) -> None:
    values = 2.0 ** torch.tensor(exponents, dtype=torch.float64)
    values = values.float()
    scale = histogram_of(values).recommended_scale(margin)
    assert scale is not None

    def fits(factor: float) -> bool:
        return bool((values.double() * factor * 2.0**margin).half().isfinite().all())

    def all_normal(factor: float) -> bool:
        return shares_by_casting(values, int(math.log2(factor)))[:2] == (0, 0)

    assert fits(scale)
    if fits(2 * scale):
        assert scale >= 1
        assert all_normal(scale)
    if scale > 1:
        # Not larger than useful; values that round up to a normal number count as subnormal.
        assert float((values.double() * scale / 2).min()) < 2.0**-14


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.inf, math.nan], []])
def test_empty_histogram_has_no_recommendation(values: list[float]) -> None:
    found = histogram_of(torch.tensor(values))
    assert found.recommended_scale() is None
    assert found.shares(0) == (0, 0, 0)
    assert found.exponents == {}


def test_subnormal_fp32_numbers_are_counted() -> None:
    tiny = torch.tensor([1e-45, 1e-39, -1e-40])
    found = histogram_of(tiny)
    assert found.exponents == {-127: 3}
    assert found.shares(100) == (1, 0, 0) == shares_by_casting(tiny, 100)
