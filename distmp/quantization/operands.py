"""Operands of matrix products: values in a low-precision format, and their scales.

All products are `a @ b.T` with a of shape [m, k] and b of shape [n, k], as GPU kernels expect. A
scale belongs to all values of an operand, to a row, or to a block of a row. Weights have square
blocks, so that the same rounded weight is used in forward and, transposed, in backward.

- "tensor", "row" and "block32": Scales are powers of two (block32: OCP MX, rounded up, so that
  nothing saturates).
- "block16": NVFP4. The scale of a block is an e4m3 number, multiplied by a power of two for the
  operand.
"""

# Note [Statistics under torch.compile]
#
# Statistics are added to one tensor in place, in forward and in backward. In a compiled graph the
# tensor would be an input that backward keeps, and torch refuses to run backward after another
# forward has changed it. So the graph computes three sums, and an operator adds them to a tensor
# that it finds by a number. The operator returns the scales that it is given, so that the compiler
# does not remove it as unused. The number is a tensor on the host: with an integer, torch would
# compile every layer again.

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Bits of an FP32 value.
_EXPONENT_BITS = 0x7F800000
_MANTISSA_WIDTH = 23
_BIAS = 127


class NumberFormat(NamedTuple):
    """A floating-point format.

    Attributes:
        mantissa_bits: Number of stored bits of the mantissa.
        smallest_exponent: Exponent of the smallest normal number.
        largest: Largest number.
        dtype: torch's dtype that stores the numbers. For "e2m1", which torch packs in pairs, it is
            an 8-bit dtype that represents them exactly.
    """

    mantissa_bits: int
    smallest_exponent: int
    largest: float
    dtype: torch.dtype

    @property
    def saturates_from(self) -> float:
        """Magnitude from which values saturate: halfway to the number after `largest`."""
        return self.largest + 2.0 ** (math.frexp(self.largest)[1] - self.mantissa_bits - 2)


FORMATS = {
    "e4m3": NumberFormat(3, -6, 448.0, torch.float8_e4m3fn),
    "e5m2": NumberFormat(2, -14, 57344.0, torch.float8_e5m2),
    "e2m1": NumberFormat(1, 0, 6.0, torch.float8_e4m3fn),
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
    half = 1 << (_MANTISSA_WIDTH - 1)
    offset = (exponents + (shift + half)).view(torch.float32)
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
    # Compare instead of adding the random number, which could round up a number of the format.
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
        FP32 of the same shape, at least 2^-126.
    """
    bits = largest.view(torch.int32)
    # Divide by `number_format.largest` in the exponent, and round up: a mantissa above its own
    # carries into the exponent.
    mantissa, exponent = math.frexp(number_format.largest)
    limit = round((2 * mantissa + exponent - 2) * 2**_MANTISSA_WIDTH)
    scales = (bits + ((1 << _MANTISSA_WIDTH) - 1 - limit)).clamp(min=1 << _MANTISSA_WIDTH)
    scales = (scales & _EXPONENT_BITS).view(torch.float32)
    return torch.where((bits > 0) & (bits < _EXPONENT_BITS), scales, 1.0)


# Statistics of each operand: the largest magnitude, and the numbers of values that are saturated or
# not finite, of nonzero values that were rounded to zero, and of all values.
STATISTICS = ("largest", "saturated", "underflowed", "elements")


# A compiled graph finds the statistics of a layer by their number.
_BY_NUMBER: WeakValueDictionary[int, LayerCounts] = WeakValueDictionary()
_NUMBERS = itertools.count()


class LayerCounts:
    """Statistics of the operands of a layer.

    Args:
        values: FP64 of shape [operands, 4], see `STATISTICS`; updated in place.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        # Views of each number, made once.
        self.rows = [row.unbind() for row in values.unbind()]
        number = next(_NUMBERS)
        self.number = torch.tensor(number)
        _BY_NUMBER[number] = self


class Counts(NamedTuple):
    """Entry for the statistics of an operand: the statistics of a layer, and a row of them."""

    layer: LayerCounts
    operand: int

    def add(
        self,
        scales: Tensor,
        scaled: Tensor,
        values: Tensor,
        largest: Tensor,
        number_format: NumberFormat,
    ) -> Tensor:
        """Add the statistics of a rounded matrix; the host does not wait.

        Args:
            scales: Any tensor that the product needs.
            scaled: The values divided by their scales, FP32.
            values: The rounded values, FP32.
            largest: The largest magnitudes of the matrix.
            number_format: The format.

        Returns:
            `scales`, or a copy.
        """
        saturated = (~(scaled.abs() < number_format.saturates_from)).sum(dtype=torch.float64)
        underflowed = scaled.logical_xor(values).sum(dtype=torch.float64)
        highest = largest.amax() if largest.numel() else largest.new_zeros(())
        sums = [highest, saturated, underflowed]
        if torch.compiler.is_compiling():
            return _add(scales, sums, values.numel(), self.layer.number, self.operand)
        _add_to(self.layer.rows[self.operand], sums, values.numel())
        return scales


@torch.library.custom_op("distmp::add_statistics", mutates_args=())
def _add(scales: Tensor, sums: list[Tensor], elements: int, number: Tensor, operand: int) -> Tensor:
    layer = _BY_NUMBER.get(int(number))
    if layer is not None:
        _add_to(layer.rows[operand], sums, elements)
    return scales.clone()


@_add.register_fake
def _(scales: Tensor, *_: object) -> Tensor:
    return torch.empty_like(scales)


def _add_to(row: Sequence[Tensor], sums: Sequence[Tensor], elements: int) -> None:
    row[0].clamp_(min=sums[0])
    row[1].add_(sums[1])
    row[2].add_(sums[2])
    row[3].add_(elements)


BLOCK_SIZES = {"block32": 32, "block16": 16}
# Smallest e4m3 number above 0: a block whose scale would round to 0 has this one.
_SMALLEST_BLOCK_SCALE = 2.0**-9


class Operand(NamedTuple):
    """A matrix in a low-precision format; it represents `values * outer`.

    Attributes:
        values: [rows, columns], FP32 with values that the format represents, multiplied by the
            scales of blocks, if any; the products are exact.
        outer: Scale of each row or of all, FP32 of shape [rows, 1] or [1, 1].
        number_format: The format of the values.
    """

    values: Tensor
    outer: Tensor
    number_format: NumberFormat

    def transposed(self) -> Operand:
        """Return the transposed matrix, for scales that do not belong to rows."""
        return self._replace(values=self.values.t())


def _expand_blocks(blocks: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Repeat a value for each block to `shape`, [rows, columns]."""
    for dimension in (0, 1):
        if block[dimension] > 1:
            blocks = blocks.repeat_interleave(block[dimension], dimension)
    return blocks[: shape[0], : shape[1]]


def quantize(
    matrix: Tensor,
    format_name: str,
    scaling: str,
    *,
    square: bool = False,
    uniform: Tensor | None = None,
    counts: Counts | None = None,
) -> Operand:
    """Round a matrix to a low-precision format, with scales for rows or blocks.

    Args:
        matrix: [rows, columns], floating point.
        format_name: "e4m3", "e5m2" or "e2m1".
        scaling: "tensor", "row", "block32" or "block16".
        square: Whether blocks are square, as those of weights, or parts of a row.
        uniform: Random numbers for stochastic rounding, FP32 from 0 to below 1, of the shape of
            `matrix`; None rounds to nearest.
        counts: Receives the statistics of the operand; None: they are not counted.
    """
    matrix, number_format = matrix.float(), FORMATS[format_name]
    size = BLOCK_SIZES.get(scaling, 1)
    largest = _largest_magnitudes(matrix, scaling, square=square)
    outer, blocks = _scales(largest, number_format, scaling)
    if blocks is not None:
        blocks = _expand_blocks(blocks, (size if square else 1, size), matrix.shape)
    scaled = matrix / (outer if blocks is None else blocks * outer)
    if uniform is None:
        values = round_to_nearest(scaled, number_format)
    else:
        values = round_stochastically(scaled, number_format, uniform)
    if counts is not None:
        outer = counts.add(outer, scaled, values, largest, number_format)
    return Operand(values if blocks is None else values * blocks, outer, number_format)


def _largest_magnitudes(matrix: Tensor, scaling: str, *, square: bool) -> Tensor:
    """Return the largest magnitude of all values, of each row, or of each block.

    Returns:
        FP32 of shape [1, 1], [rows, 1], or [blocks of rows, blocks of columns].
    """
    magnitudes = matrix.abs()
    if scaling == "tensor":
        found = magnitudes.amax() if matrix.numel() else magnitudes.new_zeros(())
        return found.reshape(1, 1)
    if scaling == "row":
        return magnitudes.amax(1, keepdim=True)
    of_rows = _largest_in_blocks(magnitudes, BLOCK_SIZES[scaling])
    return _largest_in_blocks(of_rows.t(), BLOCK_SIZES[scaling]).t() if square else of_rows


def _largest_in_blocks(magnitudes: Tensor, size: int) -> Tensor:
    """Return the largest value of each `size` columns."""
    rows, columns = magnitudes.shape
    if columns % size:
        magnitudes = torch.nn.functional.pad(magnitudes, (0, -columns % size))
    return magnitudes.reshape(rows, -(-columns // size), size).amax(2)


def _scales(
    largest: Tensor, number_format: NumberFormat, scaling: str
) -> tuple[Tensor, Tensor | None]:
    """Return the scales of rows or of all, [rows or 1, 1], and those of blocks."""
    if scaling in ("tensor", "row"):
        return power_of_two_scales(largest, number_format), None
    if scaling == "block32":
        return largest.new_ones(1, 1), power_of_two_scales(largest, number_format)
    return _block16_scales(largest, number_format)


def _block16_scales(largest: Tensor, number_format: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return the power of two for the operand, [1, 1], and the e4m3 scale of each block."""
    of_blocks = FORMATS["e4m3"]
    finite = torch.where(largest.isfinite(), largest, 0.0)
    highest = finite.amax() if finite.numel() else finite.new_zeros(())
    outer = power_of_two_scales(highest / number_format.largest, of_blocks).reshape(1, 1)
    blocks = round_to_nearest(finite / (number_format.largest * outer), of_blocks)
    blocks = blocks.clamp(min=_SMALLEST_BLOCK_SCALE)
    return outer, torch.where(finite > 0, blocks, of_blocks.largest)
