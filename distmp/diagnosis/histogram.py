"""Exact counts of gradient values by exponent, and the effect of rounding them to float16.

Multiplying a value by a power of two changes its exponent and keeps its fraction. So one table of
exponents shows, for every power-of-two loss scale, how many values float16 rounds to zero, to a
subnormal number or to infinity. Rounding to nearest even also depends on the fraction, so the table
distinguishes classes of fractions, separated by three thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# The values of FP32's exponent field, and the classes of fractions for each of them.
EXPONENTS = 256
BIAS = 127
# Class 0: a power of two. 1: above it. 2: rounds up to the next power of two in float16's largest
# subnormal exponent, where half of the last bit is 2^-10 of the power of two. 3: rounds up at
# float16's largest exponent too, where half of the last bit is 2^-11 of the power of two.
CLASSES = 4
SUBNORMAL_FRACTION = 0x7FE000
OVERFLOW_FRACTION = 0x7FF000
SPECIAL = EXPONENTS - 1

# Exponents in float16 of half the smallest subnormal number, of the smallest normal number and of
# the largest numbers.
HALF_OF_SMALLEST, SMALLEST_NORMAL, LARGEST = -25, -14, 15

# Largest exponent of a recommended scale: FP32 can represent its inverse and its products.
MOST_SCALE_EXPONENT = 100

# Number of values counted at once, which limits the memory of intermediate integers.
PIECE = 1 << 22


class Shares(NamedTuple):
    """Effect of rounding finite nonzero values to float16.

    Attributes:
        zero: Share of the values that become zero, from 0 to 1.
        subnormal: Share of the values that become subnormal numbers, which are less precise.
        infinite: Share of the values that become infinite.
    """

    zero: float
    subnormal: float
    infinite: float


class ExponentHistogram:
    """Counts of values by exponent.

    Args:
        counts: Number of values by biased FP32 exponent and class of fraction, int64 of shape
            (256, 4); a result of `count_exponents`, or a sum of such results.
    """

    def __init__(self, counts: Tensor) -> None:
        self._rows: list[list[int]] = counts.tolist()
        self._rows[0][0] = 0  # zeros do not count

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        return ExponentHistogram(torch.tensor(self._rows) + torch.tensor(other._rows))

    @property
    def infinite(self) -> int:
        """Number of infinite values."""
        return self._rows[SPECIAL][0]

    @property
    def nan(self) -> int:
        """Number of NaN values."""
        return sum(self._rows[SPECIAL][1:])

    @property
    def exponents(self) -> Mapping[int, int]:
        """Number of values with |value| in [2^e, 2^(e + 1)), by e, for each e that occurs.

        All subnormal FP32 numbers are counted at -127.
        """
        counts = {row - BIAS: sum(self._rows[row]) for row in range(SPECIAL)}
        return {exponent: count for exponent, count in counts.items() if count}

    def shares(self, scale_exponent: int) -> Shares:
        """Return the effect of rounding the values times 2^scale_exponent to float16.

        The underlying counts are exactly those of `(values * scale).half()`.

        Args:
            scale_exponent: Exponent of the scale, from -40 to 100.
        """
        counted = {"zero": 0, "subnormal": 0, "infinite": 0, "normal": 0}
        for row in range(SPECIAL):
            for fraction_class, count in enumerate(self._rows[row]):
                counted[_rounded_kind(row, fraction_class, scale_exponent)] += count
        total = max(1, sum(counted.values()))
        return Shares(*(counted[name] / total for name in Shares._fields))

    def recommended_scale(self, margin_exponent: int = 3) -> float | None:
        """Return the best power-of-two scale for float16, or None if there are no values.

        It is the smallest scale from 1 on at which no value is subnormal. It is limited so that the
        largest value stays a factor of 2^margin_exponent below overflow, and to 2^100.
        """
        occupied = [row for row in range(SPECIAL) if any(self._rows[row])]
        if not occupied:
            return None
        largest = occupied[-1]
        overflows_early = self._rows[largest][CLASSES - 1] > 0
        highest = LARGEST - overflows_early - (largest - BIAS) - margin_exponent
        useful = max(0, SMALLEST_NORMAL - (occupied[0] - BIAS))
        return math.ldexp(1.0, min(highest, useful, MOST_SCALE_EXPONENT))


def count_exponents(values: Tensor) -> Tensor:
    """Count values by exponent and class of fraction.

    Args:
        values: FP32 or 16-bit values of any shape.

    Returns:
        The counts, int64 of shape (256, 4), on the device of the values.
    """
    counts = torch.zeros(EXPONENTS * CLASSES, dtype=torch.int64, device=values.device)
    for piece in values.detach().reshape(-1).split(PIECE):
        bits = piece.float().view(torch.int32) & 0x7FFFFFFF
        fraction = bits & 0x7FFFFF
        classes = (fraction > 0).int() + (fraction >= SUBNORMAL_FRACTION)
        classes += fraction >= OVERFLOW_FRACTION
        counts += torch.bincount((bits >> 23) * CLASSES + classes, minlength=len(counts))
    return counts.view(EXPONENTS, CLASSES)


def _rounded_kind(row: int, fraction_class: int, scale_exponent: int) -> str:
    """Return the kind of number that float16 has for such a value times 2^scale_exponent."""
    # Subnormal FP32 numbers become zero: even times 2^100 they are below 2^-25.
    exponent = row - BIAS + scale_exponent
    if row == 0 or exponent < HALF_OF_SMALLEST:
        return "zero"
    if exponent == HALF_OF_SMALLEST:  # a tie is rounded to zero, which is even
        return "zero" if fraction_class == 0 else "subnormal"
    rounds_up = exponent == SMALLEST_NORMAL - 1 and fraction_class >= 2
    if exponent < SMALLEST_NORMAL:
        return "normal" if rounds_up else "subnormal"
    overflows = exponent > LARGEST or (exponent == LARGEST and fraction_class == CLASSES - 1)
    return "infinite" if overflows else "normal"
