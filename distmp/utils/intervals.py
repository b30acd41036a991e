"""The time in which several kinds of events overlap."""

from __future__ import annotations

from collections.abc import Iterable

# Start and stop, in any unit of time.
Interval = tuple[float, float]


def overlap(*inside: Iterable[Interval], without: Iterable[Interval] = ()) -> float:
    """Return how long some interval of each set is open and none of `without`, in their unit.

    Args:
        *inside: Sets of intervals, which may be unsorted and overlap.
        without: Intervals that do not count.
    """
    sets = (*inside, without)
    changes = sorted(
        change
        for index, spans in enumerate(sets)
        for start, stop in spans
        if start < stop
        for change in ((start, index, 1), (stop, index, -1))
    )
    opened = [0] * len(sets)
    total = before = 0.0
    for time, index, change in changes:
        if all(opened[:-1]) and not opened[-1]:
            total += time - before
        opened[index] += change
        before = time
    return total
