"""Fewer points of a curve, with everything that can be seen of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

MOST_POINTS = 2000
"""Points per line: about one per pixel; more take time and memory and cannot be seen."""


def thinned(steps: Values, values: Values) -> tuple[Values, Values]:
    """Keep the smallest and the largest value of each run of neighbours, so that spikes stay.

    Args:
        steps: Shape (n,), ascending.
        values: Shape (n,); NaN where there is nothing to draw.

    Returns:
        Steps and values, at most `MOST_POINTS` of them.
    """
    import numpy as np

    size = -(-len(values) // (MOST_POINTS // 2))
    if size <= 2:
        return steps, values
    runs = np.array_split(values, -(-len(values) // size))
    starts = np.cumsum([0] + [len(run) for run in runs[:-1]])
    kept = [
        start + index for start, run in zip(starts, runs, strict=True) for index in _extremes(run)
    ]
    return steps[kept], values[kept]


def smoothed(steps: Values, values: Values) -> tuple[Values, Values]:
    """Average over a centred window of a fortieth of the run, so that the line does not lag.

    Args:
        steps: Shape (n,), ascending.
        values: Shape (n,); NaN is left out of the means.

    Returns:
        Steps and means, at most `MOST_POINTS` / 2 of them.
    """
    import numpy as np

    half = len(values) // 80
    centres = np.unique(np.linspace(0, len(values) - 1, MOST_POINTS // 2).astype(int))
    windows = (values[max(0, c - half) : c + half + 1] for c in centres)
    known = (window[~np.isnan(window)] for window in windows)
    means = [window.mean() if window.size else np.nan for window in known]
    return steps[centres], np.array(means)


def _extremes(values: Values) -> list[int]:
    import numpy as np

    if np.isnan(values).all():
        return [0]
    return sorted({int(np.nanargmin(values)), int(np.nanargmax(values))})
