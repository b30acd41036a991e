from __future__ import annotations

import math
import random

import pytest

from benchmarks.report import in_turns, median_interval


def test_turns_alternate_and_the_first_do_not_count() -> None:
    asked: list[str] = []

    def measure(name: str) -> float:
        asked.append(name)
        return len(asked)

    found = in_turns(["a", "b"], 2, measure, warm_up=1)
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_names_that_cannot_be_measured_are_skipped() -> None:
    asked: list[str] = []

    def measure(name: str) -> float | None:
        asked.append(name)
        return None if name == "a" and len(asked) > 3 else 1.0

    assert in_turns(["a", "b"], 3, measure, warm_up=1) == {"b": [1.0] * 3}
    assert asked.count("a") == 2


@pytest.mark.parametrize("count", [6, 9, 15, 40])
def test_the_interval_of_a_median_covers_that_of_the_distribution(count: int) -> None:
    generator = random.Random(count)
    found = [
        median_interval([generator.expovariate(math.log(2)) for _ in range(count)])
        for _ in range(4000)
    ]
    covered = sum(interval.least <= 1 <= interval.most for interval in found) / len(found)
    assert 0.94 < covered < 0.99


def test_the_interval_of_few_values_is_their_range() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (2, 1, 3)
    assert median_interval([2.0]) == (2, 2, 2)
