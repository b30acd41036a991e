"""Compare with Python's sets of integer microseconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distmp.distributed.wait_times import Interval, overlap

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def moments(intervals: list[Interval]) -> set[int]:
    return {time for start, stop in intervals for time in range(int(start), int(stop))}


@given(spans, spans, spans)
def test_overlap_agrees_with_sets(
    some: list[Interval], others: list[Interval], left_out: list[Interval]
) -> None:
    first, second, without = moments(some), moments(others), moments(left_out)
    assert overlap(some) == len(first)
    assert overlap(some, without=left_out) == len(first - without)
    assert overlap(some, others) == len(first & second)
    assert overlap(some, others, without=left_out) == len((first & second) - without)
