"""Number formats with 4 and 8 bits, and rounding to them.

The formats are those of the OCP specifications "8-bit Floating Point" (2023) and "Microscaling
Formats" (2023). A number is rounded to the nearest one, ties to even, or stochastically. Results
are FP32 tensors whose values the format represents exactly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Bits of an FP32 value.
_EXPONENT_BITS = 0x7F800000
_MANTISSA_WIDTH = 23
_BIAS = 127


class NumberFormat(NamedTuple):
    """A floating-point format.

    Attributes:
        name: Name of the format, such as "e4m3".
        mantissa_bits: Number of stored bits of the mantissa.
        smallest_exponent: Exponent of the smallest normal number.
        largest: Largest number.
        dtype: torch's dtype that stores the numbers. For "e2m1", which torch packs in pairs, it is
            an 8-bit dtype that represents them exactly.
    """

    name: str
    mantissa_bits: int
    smallest_exponent: int
    largest: float
    dtype: torch.dtype

    @property
    def saturates_from(self) -> float:
        """Magnitude from which values saturate: halfway to the number after `largest`."""
        return self.largest + 2.0 ** (math.frexp(self.largest)[1] - self.mantissa_bits - 2)


FORMATS = {
    each.name: each
    for each in (
        NumberFormat("e4m3", 3, -6, 448.0, torch.float8_e4m3fn),
        NumberFormat("e5m2", 2, -14, 57344.0, torch.float8_e5m2),
        NumberFormat("e2m1", 1, 0, 6.0, torch.float8_e4m3fn),
    )
}


def round_to_nearest(values: Tensor, number_format: NumberFormat) -> Tensor:
    """Round to the nearest number of a format, ties to even.

    Args:
        values: FP32, any shape.
        number_format: The format.

    Returns:
        FP32 of the same shape; zeros have the sign of their value. Finite values beyond the largest
        number become the largest number; infinities and NaN become NaN.
    """
    limited, exponents = _limited(values, number_format)
    # The sum with 1.5 * 2^(e + 23 - m) keeps m bits of the mantissa, and the processor rounds it to
    # nearest even. e is the exponent of the value, or that of the smallest normal number.
    shift = (_MANTISSA_WIDTH - number_format.mantissa_bits) << _MANTISSA_WIDTH
    offset = (exponents + shift).view(torch.float32) * 1.5
    return _like(values, (limited + offset) - offset)


def round_stochastically(values: Tensor, number_format: NumberFormat, uniform: Tensor) -> Tensor:
    """Round up or down at random, so that the expectation is the value.

    Args:
        values: FP32, any shape.
        number_format: The format.
        uniform: FP32 of the same shape, random numbers from 0 to below 1.

    Returns:
        As `round_to_nearest`.
    """
    limited, exponents = _limited(values, number_format)
    spacing = (exponents - (number_format.mantissa_bits << _MANTISSA_WIDTH)).view(torch.float32)
    steps = limited / spacing
    below = steps.floor()
    # Compared, not added: a sum would round numbers of the format up.
    return _like(values, (below + (uniform < steps - below)) * spacing)


def _limited(values: Tensor, number_format: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return values up to the largest number, and the exponents of their FP32 bits, int32."""
    limited = values.clamp(-number_format.largest, number_format.largest)
    lowest = (number_format.smallest_exponent + _BIAS) << _MANTISSA_WIDTH
    return limited, (limited.view(torch.int32) & _EXPONENT_BITS).clamp(min=lowest)


def _like(values: Tensor, rounded: Tensor) -> Tensor:
    """Return rounded values, with the signs of `values`, and NaN where these are not finite."""
    return rounded.copysign(values) - (values - values)  # -0 - 0 is -0


def power_of_two_scales(largest: Tensor, number_format: NumberFormat) -> Tensor:
    """Return the smallest power of two by which values can be divided without saturation.

    A power of two loses no bit of a floating-point number, and values that were rounded with it
    stay the same if they are rounded again.

    Args:
        largest: FP32, the largest magnitudes. Zero and non-finite ones have the scale 1.
        number_format: The format.

    Returns:
        FP32 of the same shape, from 2^-126 to 2^127.
    """
    mantissa, exponent = torch.frexp(largest)
    limit_mantissa, limit_exponent = math.frexp(number_format.largest)
    power = exponent - limit_exponent + (mantissa > limit_mantissa).to(torch.int32)
    scales = ((power.clamp(-126, 127) + _BIAS) << _MANTISSA_WIDTH).view(torch.float32)
    return torch.where((largest > 0) & largest.isfinite(), scales, 1.0)
