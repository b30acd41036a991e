"""Rounding to low-precision formats, compared with an oracle that enumerates their numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmp.quantization.operands import (
    FORMATS,
    power_of_two_scales,
    round_stochastically,
    round_to_nearest,
)
from tests.quantization import oracle

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
def test_values_are_rounded_to_the_nearest_number(name: str, values: list[float]) -> None:
    result = round_to_nearest(torch.tensor(values, dtype=torch.float32), FORMATS[name])
    expected = torch.tensor([oracle.rounded(value, name) for value in values])
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_ties_and_numbers_of_the_format(name: str) -> None:
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
def test_a_dtype_of_torch_stores_the_numbers(name: str) -> None:
    values = torch.tensor(oracle.numbers(name))
    assert torch.equal(values.to(FORMATS[name].dtype).float(), values)
    assert torch.equal(values.bfloat16().float(), values)


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_has_the_value_as_its_mean(name: str) -> None:
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
def test_stochastic_rounding_keeps_numbers_of_the_format_and_limits(name: str) -> None:
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
def test_a_scale_is_the_smallest_power_of_two_without_saturation(name: str, largest: float) -> None:
    scale = power_of_two_scales(torch.tensor(largest, dtype=torch.float32), FORMATS[name]).item()
    assert scale == oracle.power_of_two(largest, name)


def test_magnitudes_without_a_scale() -> None:
    values = torch.tensor([0.0, math.inf, math.nan])
    assert power_of_two_scales(values, FORMATS["e4m3"]).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("name", "limit"), [("e4m3", 464.0), ("e5m2", 61440.0), ("e2m1", 7.0)])
def test_the_magnitude_from_which_values_saturate(name: str, limit: float) -> None:
    assert FORMATS[name].saturates_from == limit
