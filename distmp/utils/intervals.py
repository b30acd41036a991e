"""Sets of times as sorted, disjoint intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

# Start and stop, in any unit of time.
Interval = tuple[float, float]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the times in any of the spans, which may be unsorted and overlap."""
    result: list[Interval] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return result


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the times in both sets."""
    result = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        stop = min(first[i][1], second[j][1])
        if start < stop:
            result.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the times in the first set that are not in the second."""
    edges = [-math.inf, *itertools.chain(*second), math.inf]
    return intersection(first, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the intervals, in their unit."""
    return sum(stop - start for start, stop in intervals)
