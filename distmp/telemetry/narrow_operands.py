"""Summarizes how well the operands of narrow products fit their formats, for the step records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distmp.engine.narrow_products import MatmulStatistics
from distmp.quantization.counts import STATISTICS
from distmp.quantization.linear import OPERANDS

LARGEST, SATURATED, UNDERFLOWED, ELEMENTS = range(len(STATISTICS))


def summarize(statistics: MatmulStatistics) -> dict[str, dict[str, Any]]:
    """Wait for the step, and return the statistics of each operand that is narrow.

    Returns:
        For each of `OPERANDS`: "saturated", the share of the values that are saturated or not
        finite; "underflowed", the share that was rounded to zero; "largest", the largest magnitude
        on this rank; "most_saturated" and "most_underflowed", the "layer" with the largest "share",
        or None if all shares are 0.
    """
    values = statistics.read()
    summaries = {
        operand: _summary(values[:, index], statistics.layers)
        for index, operand in enumerate(OPERANDS)
    }
    return {operand: summary for operand, summary in summaries.items() if summary}


def _summary(values: Tensor, layers: Sequence[str]) -> dict[str, Any]:
    """Summarize the statistics of an operand, FP64 [layers, 4]; empty if it is not narrow."""
    _, saturated, underflowed, elements = values.sum(0).tolist()
    if elements == 0:
        return {}
    return {
        "saturated": saturated / elements,
        "underflowed": underflowed / elements,
        "largest": values[:, LARGEST].amax().item(),
        "most_saturated": _worst(values, SATURATED, layers),
        "most_underflowed": _worst(values, UNDERFLOWED, layers),
    }


def _worst(values: Tensor, statistic: int, layers: Sequence[str]) -> dict[str, Any] | None:
    shares = values[:, statistic] / values[:, ELEMENTS].clamp(min=1)
    share, layer = shares.max(0)
    return {"layer": layers[int(layer)], "share": share.item()} if share > 0 else None
