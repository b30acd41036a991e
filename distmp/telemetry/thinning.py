"""Reduce the number of points of a curve without a visible change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

MAX_POINTS = 2000
"""Maximum number of points per line, about one per pixel."""


def thinned(steps: Values, values: Values) -> tuple[Values, Values]:
    """Keep the smallest and the largest value of each group of neighbors, which preserves spikes.

    Args:
        steps: Shape (n,), ascending.
        values: Shape (n,); NaN where there is nothing to draw.

    Returns:
        Steps and values, at most `MAX_POINTS` of them.
    """
    import numpy as np

    size = -(-len(values) // (MAX_POINTS // 2))
    if size <= 2:
        return steps, values
    groups = np.array_split(values, -(-len(values) // size))
    starts = np.cumsum([0] + [len(group) for group in groups[:-1]])
    kept = [
        start + index
        for start, group in zip(starts, groups, strict=True)
        for index in _extremes(group)
    ]
    return steps[kept], values[kept]


def smoothed(steps: Values, values: Values) -> tuple[Values, Values]:
    """Average over a centered window of 1/40 of the run, so that the line does not lag.

    Args:
        steps: Shape (n,), ascending.
        values: Shape (n,); NaN is excluded from the means.

    Returns:
        Steps and means, at most `MAX_POINTS` / 2 of them.
    """
    import numpy as np

    half = len(values) // 80
    centers = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS // 2).astype(int))
    windows = (values[max(0, c - half) : c + half + 1] for c in centers)
    known = (window[~np.isnan(window)] for window in windows)
    means = [window.mean() if window.size else np.nan for window in known]
    return steps[centers], np.array(means)


def _extremes(values: Values) -> list[int]:
    import numpy as np

    if np.isnan(values).all():
        return [0]
    return sorted({int(np.nanargmin(values)), int(np.nanargmax(values))})
