"""Sets of times, as intervals in order that do not touch each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# From and to, in microseconds.
Interval = tuple[float, float]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the times that lie in any of the spans, which may stand in any order and overlap."""
    found: list[Interval] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the times that lie in both."""
    found = []
    one = other = 0
    while one < len(first) and other < len(second):
        start = max(first[one][0], second[other][0])
        stop = min(first[one][1], second[other][1])
        if start < stop:
            found.append((start, stop))
        if first[one][1] < second[other][1]:
            one += 1
        else:
            other += 1
    return found


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the times that lie in the first and not in the second."""
    found = []
    index = 0
    for begin, stop in first:
        start = begin
        while index < len(second) and second[index][1] <= start:
            index += 1
        hole = index
        while hole < len(second) and second[hole][0] < stop:
            if start < second[hole][0]:
                found.append((start, second[hole][0]))
            start = second[hole][1]
            hole += 1
        if start < stop:
            found.append((start, stop))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return how long they are together."""
    return sum(stop - start for start, stop in intervals)
