from __future__ import annotations

import math

import torch

from distmp.engine.low_precision_matmuls import MatmulStatistics
from distmp.quantization.linear import OPERANDS
from distmp.telemetry.measurements import summarize


def statistics(sums: dict[str, list[list[float]]], largest: float = 2.0) -> MatmulStatistics:
    """Return statistics of two layers; operands without numbers have high precision."""
    values = torch.zeros(2, len(OPERANDS), 3, dtype=torch.float64)
    for operand, numbers in sums.items():
        values[:, OPERANDS.index(operand)] = torch.tensor(numbers, dtype=torch.float64)
    magnitudes = torch.full(values.shape[:2], 1.0, dtype=torch.float64)
    magnitudes[1] = largest
    return MatmulStatistics(["first", "second"], values, magnitudes)


def test_shares_are_those_of_all_values() -> None:
    found = summarize(statistics({"input": [[1, 0, 10], [0, 6, 30]], "grad": [[0, 0, 4]] * 2}))
    assert found == {
        "input": {
            "saturated": 1 / 40,
            "underflowed": 6 / 40,
            "largest": 2.0,
            "most_saturated": {"layer": "first", "share": 0.1},
            "most_underflowed": {"layer": "second", "share": 0.2},
        },
        "grad": {
            "saturated": 0.0,
            "underflowed": 0.0,
            "largest": 2.0,
            "most_saturated": None,
            "most_underflowed": None,
        },
    }


def test_a_layer_that_was_not_called_has_no_share() -> None:
    found = summarize(statistics({"weight": [[0, 0, 0], [5, 0, 5]]}))
    assert found["weight"]["most_saturated"] == {"layer": "second", "share": 1.0}


def test_values_that_are_not_finite() -> None:
    found = summarize(statistics({"input": [[1, 0, 4]] * 2}, largest=math.nan))
    assert math.isnan(found["input"]["largest"])
