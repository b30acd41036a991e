from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.utils.units import bytes_text, duration, quantity, scale_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.034, "0.03"),
        (0.994, "0.99"),
        (0.996, "1.00"),
        (12, "12.0"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (12345, "12.3k"),
        (123456, "123k"),
        (4.56e9, "4.56G"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_quantity_is_formatted_with_prefix(value: float, text: str) -> None:
    assert quantity(value) == text


@given(st.floats(min_value=0.5, max_value=9e17))
def test_quantity_keeps_width_and_value(value: float) -> None:
    text = quantity(value)
    assert len(text) <= 5
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1], 1)
    assert float(text.rstrip("kMGTP")) * factor == pytest.approx(value, rel=0.011)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1288490189, "1.2 GiB"),
        (99.96 * 2**20, "100 MiB"),
        (1023.6 * 2**20, "1.0 GiB"),
        (139 * 2**30, "139 GiB"),
        (5 * 2**50, "5120 TiB"),
    ],
)
def test_bytes_are_formatted_with_unit(value: float, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0:00"),
        (0.4, "0:00"),
        (59.7, "1:00"),
        (221, "3:41"),
        (3599, "59:59"),
        (3599.6, "1:00:00"),
        (3723, "1:02:03"),
        (2 * 86400 + 3 * 3600 + 59, "2d 03h"),
        (86399, "23:59:59"),
        (86400, "1d 00h"),
        (100 * 86400, "100d"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_duration_is_formatted(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("scale", "text"),
    [(1, "1"), (128, "128"), (1024, "2^10"), (65536, "2^16"), (0.5, "2^-1"), (1000, "1000")],
)
def test_scale_is_formatted_as_power_of_two(scale: float, text: str) -> None:
    assert scale_text(scale) == text
