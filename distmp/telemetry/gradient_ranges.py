"""Plot of a calibration: magnitudes of gradients compared with the range of float16."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distmp.diagnosis.gradient_recorder import Histograms
from distmp.diagnosis.histogram import LARGEST, SMALLEST_NORMAL, ExponentHistogram
from distmp.utils.files import replacing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.float64]

_SMALLEST = -24
_BLUE, _VERMILION, _GREEN = "#0072B2", "#D55E00", "#009E73"
# Smaller gradients are drawn at the edge: no loss scale brings them into the range of float16.
_LOWEST, _HIGHEST = -70, 127
_MOST_LABELS = 40
_LEAST_SHARE = 1e-7


def draw_gradient_ranges(
    histograms: Histograms, scale: float | None, path: str | os.PathLike[str]
) -> None:
    """Draw a histogram of all gradients of each kind, and below it one per layer group.

    Does not change matplotlib's global state and opens no window.

    Args:
        histograms: Histograms by kind of gradient and layer group.
        scale: The recommended loss scale, a power of two, or None.
        path: The PNG file, which is replaced atomically; its folder must exist.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = max(len(of_kind) for of_kind in histograms.values())
    lower = 0.25 * min(max(groups, 4), _MOST_LABELS)
    figure = Figure(figsize=(14, 4.5 + lower), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(
        2, len(histograms), sharex=True, squeeze=False, height_ratios=[3.5, lower]
    )
    for column, (kind, of_kind) in enumerate(histograms.items()):
        counts = {name: _counts(histogram) for name, histogram in of_kind.items()}
        _draw_total(axes[0, column], counts, kind)
        _draw_groups(axes[1, column], counts)
        for panel in axes[:, column]:
            _mark_ranges(panel, scale)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False)
    axes[0, 0].set_xlim(*_limits(histograms, scale))
    axes[0, 0].set_ylabel("share of the gradients")
    with replacing(path) as file:
        canvas.print_png(file)


def _draw_total(axes: Any, counts: Mapping[str, Counts], kind: str) -> None:
    import numpy as np

    total = np.sum(list(counts.values()), axis=0) if counts else _counts(ExponentHistogram.empty())
    positions = np.arange(_LOWEST, _HIGHEST + 1) + 0.5
    # Before the bars: a logarithmic axis cannot find limits without any bars.
    axes.set_ylim(_LEAST_SHARE, 2)
    axes.set_yscale("log")
    axes.bar(positions, total / max(1, total.sum()), width=0.9, color=_BLUE)
    axes.set_title(f"Gradients of {kind}", loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_groups(axes: Any, counts: Mapping[str, Counts]) -> None:
    import numpy as np
    from matplotlib.colors import LogNorm

    axes.set_xlabel("exponent $e$ of gradients between $2^e$ and $2^{e+1}$")
    axes.set_yticks([])
    if not counts:
        return
    shares = np.stack([of_group / max(1, of_group.sum()) for of_group in counts.values()])
    axes.imshow(
        np.where(shares > 0, shares, np.nan),
        aspect="auto",
        interpolation="none",
        cmap="Blues",
        norm=LogNorm(_LEAST_SHARE, 1),
        extent=(_LOWEST, _HIGHEST + 1, len(shares) - 0.5, -0.5),
    )
    every = -(-len(shares) // _MOST_LABELS)
    axes.set_yticks(range(0, len(shares), every), list(counts)[::every], fontsize=8)


def _mark_ranges(axes: Any, scale: float | None) -> None:
    """Mark the range of float16 without a loss scale, and with the recommended one."""
    _mark_range(axes, 0, _VERMILION, "range of float16 (dashed: with full precision)")
    if scale is not None and scale != 1:
        exponent = math.frexp(scale)[1] - 1
        _mark_range(axes, exponent, _GREEN, f"the same with a loss scale of $2^{{{exponent}}}$")


def _mark_range(axes: Any, scale_exponent: int, color: str, label: str) -> None:
    for edge in (_SMALLEST, LARGEST + 1):
        axes.axvline(edge - scale_exponent, color=color, linewidth=1.6, label=label)
        label = "_"  # one entry in the legend
    axes.axvline(SMALLEST_NORMAL - scale_exponent, color=color, linewidth=1.2, linestyle="--")


def _counts(histogram: ExponentHistogram) -> Counts:
    """Return the counts from the lowest to the highest drawn exponent."""
    import numpy as np

    counts = np.zeros(_HIGHEST + 1 - _LOWEST)
    for exponent, count in histogram.exponents.items():
        counts[max(exponent, _LOWEST) - _LOWEST] += count
    return counts


def _limits(histograms: Histograms, scale: float | None) -> tuple[float, float]:
    """Return the range of exponents that shows every gradient and both ranges of float16."""
    shift = 0 if scale is None else math.frexp(scale)[1] - 1
    edges = [_SMALLEST, _SMALLEST - shift, LARGEST + 1, LARGEST + 1 - shift]
    for of_kind in histograms.values():
        for histogram in of_kind.values():
            edges += histogram.exponents
    return max(_LOWEST, min(edges)) - 1, min(_HIGHEST, max(edges)) + 2
