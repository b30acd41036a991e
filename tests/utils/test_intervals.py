"""Compare with Python's sets of integer microseconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distmp.utils.intervals import Interval, difference, intersection, length, union

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def moments(intervals: list[Interval]) -> set[int]:
    return {time for start, stop in intervals for time in range(int(start), int(stop))}


def is_in_order(intervals: list[Interval]) -> bool:
    ends = [end for interval in intervals for end in interval]
    return ends == sorted(ends) and all(start < stop for start, stop in intervals)


@given(spans, spans)
def test_interval_operations_agree_with_sets(some: list[Interval], others: list[Interval]) -> None:
    first, second = union(some), union(others)
    assert is_in_order(first)
    assert moments(first) == moments(some)
    assert length(first) == len(moments(some))
    for found, expected in (
        (intersection(first, second), moments(some) & moments(others)),
        (difference(first, second), moments(some) - moments(others)),
    ):
        assert is_in_order(found)
        assert moments(found) == expected
