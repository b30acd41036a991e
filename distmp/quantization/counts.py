"""Statistics of the operands of low-precision matmuls, added where operands are rounded."""

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
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from distmp.quantization.formats import NumberFormat

# What is counted for each operand: the largest magnitude, the number of values that are saturated
# or not finite, of nonzero values that were rounded to zero, and of all values.
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
        number = next(_NUMBERS)
        self.number = torch.tensor(number)
        _BY_NUMBER[number] = self

    def of(self, operand: int) -> Counts:
        """Return where the statistics of an operand are added."""
        return Counts(self.number, operand)


class Counts(NamedTuple):
    """Where the statistics of an operand are added: the number of a layer, int64, and a row."""

    number: Tensor
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
        saturated = ~(scaled.abs() < number_format.saturates_from)
        underflowed = (scaled != 0).sum() - (values != 0).sum()
        highest = largest.amax() if largest.numel() else largest.new_zeros(())
        sums = torch.stack([highest.double(), saturated.sum().double(), underflowed.double()])
        if torch.compiler.is_compiling():
            return _add(scales, sums, values.numel(), self.number, self.operand)
        _add_to(_BY_NUMBER[int(self.number)].values[self.operand], sums, values.numel())
        return scales


@torch.library.custom_op("distmp::add_statistics", mutates_args=())
def _add(scales: Tensor, sums: Tensor, elements: int, number: Tensor, operand: int) -> Tensor:
    counts = _BY_NUMBER.get(int(number))
    if counts is not None:
        _add_to(counts.values[operand], sums, elements)
    return scales.clone()


@_add.register_fake
def _(scales: Tensor, sums: Tensor, elements: int, number: Tensor, operand: int) -> Tensor:
    return torch.empty_like(scales)


def _add_to(row: Tensor, sums: Tensor, elements: int) -> None:
    torch.maximum(row[0], sums[0], out=row[0])
    row[1:3] += sums[1:]
    row[3] += elements
