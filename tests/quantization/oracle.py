"""Number formats and scales in plain Python and float64, written from the OCP specifications."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from distmp.quantization.operands import Operand

# Bits of exponent and mantissa, bias, and the largest number.
LAYOUTS = {"e4m3": (4, 3, 7, 448.0), "e5m2": (5, 2, 15, 57344.0), "e2m1": (2, 1, 1, 6.0)}
BLOCK_SIZES = {"block32": 32, "block16": 16}


@cache
def numbers(name: str) -> list[float]:
    """Return all numbers of a format from 0 on, in order; their index is their bit pattern."""
    exponent_bits, mantissa_bits, bias, largest = LAYOUTS[name]
    found = []
    for pattern in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = pattern >> mantissa_bits, pattern & (2**mantissa_bits - 1)
        if exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        if value <= largest:
            found.append(value)
    return found


def rounded(value: float, name: str) -> float:
    """Return the nearest number; the one with the even bit pattern if two are equally near."""
    if not math.isfinite(value):
        return math.nan
    known = numbers(name)
    magnitude = Fraction(abs(value))
    if magnitude >= known[-1]:
        return math.copysign(known[-1], value)
    upper = bisect.bisect_right(known, magnitude)
    lower = upper - 1
    below, above = magnitude - Fraction(known[lower]), Fraction(known[upper]) - magnitude
    if below == above:
        nearest = lower if lower % 2 == 0 else upper
    else:
        nearest = lower if below < above else upper
    return math.copysign(known[nearest], value)


def neighbours(value: float, name: str) -> tuple[float, float]:
    """Return the numbers of the format below and above a magnitude within its range."""
    known = numbers(name)
    upper = bisect.bisect_left(known, value)
    if known[upper] == value:
        return value, value
    return known[upper - 1], known[upper]


def power_of_two(largest: float, name: str) -> float:
    """Return the smallest power of two s, from 2^-126 on, with largest / s within the format."""
    if largest == 0 or not math.isfinite(largest):
        return 1.0
    exponent = -126
    while Fraction(largest) > Fraction(LAYOUTS[name][3]) * Fraction(2) ** exponent:
        exponent += 1
    return 2.0**exponent


def dequantized(matrix: Tensor, name: str, scaling: str) -> Tensor:
    """Return what an operand with blocks of a row represents, float64."""
    rows = matrix.double().tolist()
    highest = max((abs(v) for row in rows for v in row), default=0.0)
    size = BLOCK_SIZES.get(scaling)
    result = []
    for row in rows:
        width = size or max(1, len(row))
        new: list[float] = []
        for start in range(0, len(row), width):
            block = row[start : start + width]
            largest = max(map(abs, block))
            scale = _scale(highest if scaling == "tensor" else largest, highest, name, scaling)
            new += [rounded(v / scale, name) * scale for v in block]
        result.append(new)
    return torch.tensor(result, dtype=torch.float64)


def _scale(largest: float, highest: float, name: str, scaling: str) -> float:
    if scaling != "block16":
        return power_of_two(largest, name)
    outer = power_of_two(highest / LAYOUTS[name][3], "e4m3")
    if largest == 0:
        return outer
    return max(rounded(largest / (LAYOUTS[name][3] * outer), "e4m3"), 2.0**-9) * outer


def restored(operand: Operand) -> Tensor:
    """Return the matrix that an operand represents, FP32 [rows, columns]."""
    return operand.values * operand.outer
