"""Exact counts of gradient values by their exponent, and what float16 would make of them.

A value times a loss scale that is a power of two keeps its fraction and moves by whole exponents.
So a table of exponents says, for every such scale at once, how many values float16 would turn into
zero, into a subnormal number or into infinity, as long as it tells apart the fractions at which
rounding to the nearest even number changes sides. There are three of those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# The exponents that FP32's exponent field encodes, and the classes of fractions within each.
EXPONENTS = 256
BIAS = 127
# 0: a power of two. 1: above it. 2: rounds up to the next power of two where float16 is subnormal
# and its last bit is worth 2^-10 of the value. 3: likewise at the upper end of float16, 2^-11.
CLASSES = 4
SUBNORMAL_FRACTION = 0x7FE000
OVERFLOW_FRACTION = 0x7FF000
SPECIAL = EXPONENTS - 1

# float16: the exponents of half its smallest subnormal number, its smallest normal number, and the
# largest numbers that it has.
HALF_OF_SMALLEST, SMALLEST_NORMAL, LARGEST = -25, -14, 15

# More would leave what a loss scale, an FP32 number, can be multiplied and divided by.
MOST_SCALE_EXPONENT = 100

# Values looked at in one go: bounds the memory of the intermediate integers.
PIECE = 1 << 22


class Shares(NamedTuple):
    """What float16 makes of the finite values other than zero, as shares of their number.

    Attributes:
        zero: Become zero.
        subnormal: Become subnormal numbers, which have less precision.
        infinite: Become infinite.
    """

    zero: float
    subnormal: float
    infinite: float


class ExponentHistogram:
    """Counts of values by exponent.

    Args:
        counts: int64 of shape (256, 4): the exponent as FP32 encodes it by the class of fraction,
            as `count_exponents` returns it; sums of such counts as well.
    """

    def __init__(self, counts: Tensor) -> None:
        self._rows: list[list[int]] = counts.tolist()

    @classmethod
    def empty(cls) -> ExponentHistogram:
        """Return the histogram of no value at all."""
        return cls(torch.zeros(EXPONENTS, CLASSES, dtype=torch.int64))

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        return ExponentHistogram(torch.tensor(self._rows) + torch.tensor(other._rows))

    @property
    def values(self) -> int:
        """How many values were counted."""
        return sum(map(sum, self._rows))

    @property
    def zeros(self) -> int:
        """How many of them are zero."""
        return self._rows[0][0]

    @property
    def infinite(self) -> int:
        """How many are infinite."""
        return self._rows[SPECIAL][0]

    @property
    def nan(self) -> int:
        """How many are NaN."""
        return sum(self._rows[SPECIAL][1:])

    @property
    def exponents(self) -> Mapping[int, int]:
        """How many values have |value| in [2^e, 2^(e + 1)), by e, for those e that occur.

        FP32's own subnormal numbers all stand at -127.
        """
        counts = {row - BIAS: sum(self._row(row)) for row in range(SPECIAL)}
        return {exponent: count for exponent, count in counts.items() if count}

    def shares(self, scale_exponent: int) -> Shares:
        """Return what float16 makes of the values times 2^scale_exponent (from -40 to 100).

        The counts behind it are exactly those of `(values * scale).half()`.
        """
        counted = {"zero": 0, "subnormal": 0, "infinite": 0, "normal": 0}
        for row in range(SPECIAL):
            for fraction_class, count in enumerate(self._row(row)):
                counted[_fate(row, fraction_class, scale_exponent)] += count
        total = max(1, sum(counted.values()))
        return Shares(*(counted[name] / total for name in Shares._fields))

    def recommended_scale(self, margin_exponent: int = 3) -> float | None:
        """Return the power of two that float16 is served best by, or None without any value.

        It is the largest one at which the largest value stays 2^margin_exponent below overflow, or
        the smallest one, from 1 on, at which no value is subnormal, if that is less; at most 2^100.
        """
        occupied = [
            (row, fraction_class)
            for row in range(SPECIAL)
            for fraction_class, count in enumerate(self._row(row))
            if count
        ]
        if not occupied:
            return None
        largest, largest_class = occupied[-1]
        overflows_early = largest_class == CLASSES - 1
        highest = LARGEST - overflows_early - (largest - BIAS) - margin_exponent
        useful = max(0, SMALLEST_NORMAL - (occupied[0][0] - BIAS))
        return math.ldexp(1.0, min(highest, useful, MOST_SCALE_EXPONENT))

    def _row(self, row: int) -> list[int]:
        """Return the counts of one exponent, without zeros."""
        return [0, *self._rows[0][1:]] if row == 0 else self._rows[row]


def count_exponents(values: Tensor) -> Tensor:
    """Return how often each exponent occurs, int64 of shape (256, 4), on the values' device.

    Args:
        values: Any shape; FP32, or a 16-bit type, which FP32 holds exactly.
    """
    counts = torch.zeros(EXPONENTS * CLASSES, dtype=torch.int64, device=values.device)
    for piece in values.detach().reshape(-1).split(PIECE):
        bits = piece.float().view(torch.int32) & 0x7FFFFFFF
        fraction = bits & 0x7FFFFF
        classes = (fraction > 0).int() + (fraction >= SUBNORMAL_FRACTION)
        classes += fraction >= OVERFLOW_FRACTION
        counts += torch.bincount((bits >> 23) * CLASSES + classes, minlength=len(counts))
    return counts.view(EXPONENTS, CLASSES)


def _fate(row: int, fraction_class: int, scale_exponent: int) -> str:
    """Return what float16 makes of a value of this exponent and class times 2^scale_exponent."""
    # FP32's subnormal numbers are as good as zero here: even times 2^100 they are below 2^-25.
    exponent = row - BIAS + scale_exponent
    if row == 0 or exponent < HALF_OF_SMALLEST:
        return "zero"
    if exponent == HALF_OF_SMALLEST:  # exactly in the middle, the even neighbour is zero
        return "zero" if fraction_class == 0 else "subnormal"
    rounds_up = exponent == SMALLEST_NORMAL - 1 and fraction_class >= 2
    if exponent < SMALLEST_NORMAL:
        return "normal" if rounds_up else "subnormal"
    overflows = exponent > LARGEST or (exponent == LARGEST and fraction_class == CLASSES - 1)
    return "infinite" if overflows else "normal"
