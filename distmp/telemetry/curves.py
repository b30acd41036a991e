"""Plot loss, learning rate, gradient norm and loss scale of a run over its steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distmp.models.settings import EMA_PREFIX
from distmp.telemetry.records import StepRecord
from distmp.telemetry.thinning import smoothed, thinned
from distmp.utils.files import replacing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

# Okabe and Ito's palette, which is safe for color blindness.
_BLUE, _SKY, _VERMILION, _GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"


def draw_curves(records: Sequence[StepRecord], path: str | os.PathLike[str]) -> bool:
    """Draw panels over a shared step axis into a PNG, which is replaced atomically.

    There are four panels, and one for each metric on held-out data. Non-finite values leave gaps.
    Does not change matplotlib's global state and opens no window.

    Args:
        records: Steps in ascending order.
        path: The PNG file; its folder must exist.

    Returns:
        Whether a file was written; without records there is none.
    """
    if not records:
        return False
    # pyplot would load a GUI backend, and takes most of a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    metrics = _metric_names(records)
    figure = Figure(
        figsize=(10, 11 + 2 * len(metrics)),
        dpi=110,
        layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08),
    )
    canvas = FigureCanvasAgg(figure)
    loss, *panels, learning_rate, norm, scale = figure.subplots(
        4 + len(metrics), 1, sharex=True, height_ratios=[3, *[2] * len(metrics), 1, 2, 2]
    )
    _draw_loss(loss, records)
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_metric(axes, records, metric)
    _draw_learning_rate(learning_rate, records)
    _draw_norm(norm, records)
    _draw_scale(scale, records)
    scale.set_xlabel("step")
    scale.xaxis.set_major_locator(
        MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1)
    )
    with replacing(path) as file:
        canvas.print_png(file)
    return True


def _draw_loss(axes: Any, records: Sequence[StepRecord]) -> None:
    steps, losses = _steps(records), _values([record.loss for record in records])
    _raw_line(axes, steps, losses, _SKY, "training")
    _smooth_line(axes, steps, losses, _BLUE, "training, smoothed")
    validated = [record for record in records if record.validation_loss is not None]
    if validated:
        values = _values([record.validation_loss for record in validated])
        style = {"color": _VERMILION, "marker": "o", "markersize": 4, "linewidth": 1}
        axes.plot(_steps(validated), values, **style, label="validation")
    if _spans_decades(losses):
        _logarithmic_axis(axes, losses)
    _finish(axes, "Loss", "mean loss")


def _metric_names(records: Sequence[StepRecord]) -> list[str]:
    """Return the names of the metrics, without those of the average of the weights."""
    names = [name for record in records for name in record.validation_metrics or {}]
    return [*dict.fromkeys(name.removeprefix(EMA_PREFIX) for name in names)]


def _draw_metric(axes: Any, records: Sequence[StepRecord], metric: str) -> None:
    for name, color in ((metric, _VERMILION), (f"{EMA_PREFIX}{metric}", _GREEN)):
        measured = [r for r in records if name in (r.validation_metrics or {})]
        if measured:
            values = _values([(r.validation_metrics or {})[name] for r in measured])
            style = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1}
            axes.plot(_steps(measured), values, **style, label=name)
    _finish(axes, f"Held-out {metric}", metric)


def _draw_learning_rate(axes: Any, records: Sequence[StepRecord]) -> None:
    rates = _values([record.learning_rate for record in records])
    axes.plot(*thinned(_steps(records), rates), color=_BLUE, marker=_marker(records))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_ylim(bottom=0)
    _finish(axes, "Learning rate", "rate", legend=False)


def _draw_norm(axes: Any, records: Sequence[StepRecord]) -> None:
    steps, norms = _steps(records), _values([record.grad_norm for record in records])
    norms[norms <= 0] = float("nan")
    _raw_line(axes, steps, norms, _SKY, "each step")
    _smooth_line(axes, steps, norms, _BLUE, "smoothed")
    _logarithmic_axis(axes, norms)
    _finish(axes, "Gradient norm before clipping", "norm")


def _logarithmic_axis(axes: Any, values: Values) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    # Plain numbers (0.5); ticks between powers of ten only if there are few of these.
    subdivisions = (1.0,) if _spans_decades(values) else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subdivisions))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_scale(axes: Any, records: Sequence[StepRecord]) -> None:
    import numpy as np

    scales = _values([record.loss_scale for record in records])
    axes.plot(_steps(records), scales, color=_GREEN, drawstyle="steps-mid", marker=_marker(records))
    skipped = [record.step for record in records if record.skipped]
    axes.plot(
        skipped,
        # Along the lower edge, independent of the scale.
        np.full(len(skipped), 0.06),
        transform=axes.get_xaxis_transform(),
        color=_VERMILION,
        marker="|",
        markersize=14,
        markeredgewidth=1.5,
        linestyle="none",
        label=f"{len(skipped)} of {len(records)} steps skipped",
    )
    known = scales[scales > 0]
    # A logarithmic axis without a single value warns and has no ticks.
    if known.size:
        axes.set_yscale("log", base=2)
        axes.set_ylim(known.min() / 4, known.max() * 4)
    _finish(axes, "Loss scale", "scale")


def _finish(axes: Any, title: str, label: str, *, legend: bool = True) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(label)
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if legend:
        axes.legend(loc="upper right", fontsize=9, frameon=True, framealpha=0.8, edgecolor="none")


def _raw_line(axes: Any, steps: Values, values: Values, color: str, label: str) -> None:
    x, y = thinned(steps, values)
    axes.plot(x, y, color=color, alpha=0.6, linewidth=0.8, marker=_marker(steps), label=label)


def _smooth_line(axes: Any, steps: Values, values: Values, color: str, label: str) -> None:
    axes.plot(*smoothed(steps, values), color=color, linewidth=1.6, label=label)


def _marker(points: Sequence[Any] | Values) -> str | None:
    """Return a marker if there are few points: a line does not show a point between two gaps."""
    return "." if len(points) <= 50 else None


def _steps(records: Sequence[StepRecord]) -> Values:
    return _values([record.step for record in records])


def _values(values: Sequence[float | None]) -> Values:
    """Convert to float64, with NaN for values that cannot be drawn (infinite or too large)."""
    import numpy as np

    array = np.array(values, dtype=np.float64)
    array[~(np.abs(array) < 1e100)] = np.nan
    return array


def _spans_decades(values: Values) -> bool:
    known = values[values == values]
    return bool(known.size and known.min() > 0 and known.max() > 1000 * known.min())
