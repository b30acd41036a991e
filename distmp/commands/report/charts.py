"""The data of the report's charts, which `charts.js` draws at the width of the window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distmp.commands.report.formats import OPERANDS, changed
from distmp.commands.report.run import Run
from distmp.models.settings import EMA_PREFIX
from distmp.telemetry.records import StepRecord
from distmp.telemetry.thinning import smoothed, thinned

Chart = dict[str, Any]
Value = Callable[[StepRecord], float]

# With at most this many steps, a smoothed line would coincide with the line itself.
FEW_POINTS = 80
# Lines of more ranks cannot be distinguished.
MAX_RANKS = 16


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts from top to bottom.

    Each chart has `title`, `unit`, `logarithm` (the base of the axis, or 0) and `series`; a series
    has `label`, `run` (0 or 1), `kind` ("line", "smooth", "dots" or "marks") and the points `x`,
    `y`. Non-finite values are null and leave a gap. Marks have `mark`, what happened in these
    steps. Lines of several operands or ranks have `number`, which selects their color.
    """
    throughput = " or ".join(dict.fromkeys(run.throughput_unit for run in runs))
    return [
        _chart("Loss", "", runs, lambda r: r.loss, smooth=True, extra=_validation),
        *_metrics(runs),
        _chart("Learning rate", "", runs, lambda r: r.learning_rate),
        _chart("Gradient norm before clipping", "", runs, _norm, logarithm=10, smooth=True),
        _chart("Loss scale", "", runs, lambda r: r.loss_scale, logarithm=2, extra=_skipped),
        _chart("Throughput", throughput, runs, _steady(lambda r: r.weight_per_second)),
        _chart("Time of a step", "s", runs, _steady(lambda r: r.step_seconds)),
        *_rank_times(runs),
        *_narrow_operands(runs),
        _chart("Peak memory of the first rank", "MiB", runs, lambda r: r.memory_bytes / 2**20),
    ]


def _chart(
    title: str,
    unit: str,
    runs: Sequence[Run],
    value: Value,
    *,
    logarithm: int = 0,
    smooth: bool = False,
    extra: Callable[[Run], list[Chart]] | None = None,
) -> Chart:
    series: list[Chart] = []
    for index, run in enumerate(runs):
        lines = [_line("each step", run.records, value), *(extra(run) if extra else [])]
        if smooth and len(run.records) > FEW_POINTS:
            lines.append(_line("smoothed", run.records, value, smooth=True))
        for line in lines:
            line["run"] = index
            if len(runs) > 1:
                line["label"] = f"{run.name}, {line['label']}"
        series += lines
    return {"title": title, "unit": unit, "logarithm": logarithm, "series": series}


def _validation(run: Run) -> list[Chart]:
    validated = [record for record in run.records if record.validation_loss is not None]
    if not validated:
        return []
    line = _line("validation", validated, lambda r: r.validation_loss or 0.0)
    return [line | {"kind": "dots"}]


def _metrics(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield a chart of each metric on held-out data; that of the average is in the same chart."""
    found = [name for run in runs for r in run.records for name in r.validation_metrics or {}]
    for metric in dict.fromkeys(name.removeprefix(EMA_PREFIX) for name in found):
        series: list[Chart] = []
        for index, run in enumerate(runs):
            for name in (metric, f"{EMA_PREFIX}{metric}"):
                records = [r for r in run.records if name in (r.validation_metrics or {})]
                if records:
                    label = name if len(runs) == 1 else f"{run.name}, {name}"
                    line = _line(label, records, _of_metric(name))
                    series.append(line | {"kind": "dots", "run": index})
        title = f"Held-out {metric}"
        yield {"title": title, "unit": "", "logarithm": 0, "series": series}


def _of_metric(name: str) -> Value:
    return lambda record: (record.validation_metrics or {})[name]


def _skipped(run: Run) -> list[Chart]:
    skipped = [record for record in run.records if record.skipped]
    if not skipped:
        return []
    marks = _line(f"{len(skipped):,} skipped", skipped, lambda r: r.loss_scale)
    return [marks | {"kind": "marks", "mark": "skipped"}]


def _rank_times(runs: Sequence[Run]) -> list[Chart]:
    """Return the own time of every rank, if ranks were compared."""
    series: list[Chart] = []
    for index, run in enumerate(runs):
        compared = [record for record in run.records if record.rank_seconds]
        ranks = max((len(record.rank_seconds or []) for record in compared), default=0)
        for rank in range(min(ranks, MAX_RANKS)):
            label = f"rank {rank}" if len(runs) == 1 else f"{run.name}, rank {rank}"
            series.append(_line(label, compared, _of_rank(rank)) | {"run": index, "number": rank})
    chart = {"title": "Time of each rank without waiting", "unit": "s", "logarithm": 0}
    return [{**chart, "series": series}] if series else []


def _of_rank(rank: int) -> Value:
    def seconds(record: StepRecord) -> float:
        times = record.rank_seconds or []
        return times[rank] if rank < len(times) else math.nan

    return seconds


def _narrow_operands(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield a chart of each share of the operands of narrow products, if there are any."""
    for share in ("underflowed", "saturated"):
        series: list[Chart] = []
        for index, run in enumerate(runs):
            measured = [record for record in run.records if record.narrow_operands]
            found = [name for record in measured for name in record.narrow_operands or {}]
            for name in dict.fromkeys(found):
                label = OPERANDS[name] if len(runs) == 1 else f"{run.name}, {OPERANDS[name]}"
                line = _line(label, measured, _of_operand(name, share))
                series.append(line | {"run": index, "number": [*OPERANDS].index(name)})
            if found:
                series += _changed_formats(run, index, runs)
        if series:
            title = f"{share.capitalize()} operands of narrow products"
            yield {"title": title, "unit": "%", "logarithm": 0, "series": series}


def _changed_formats(run: Run, index: int, runs: Sequence[Run]) -> list[Chart]:
    """Return the marks of steps in which formats changed, if there are any."""
    records = changed(run.records)
    if not records:
        return []
    label = f"{len(records):,} change{'s' if len(records) > 1 else ''} of formats"
    marks = _line(label if len(runs) == 1 else f"{run.name}, {label}", records, _nothing)
    return [marks | {"run": index, "kind": "marks", "mark": "formats changed"}]


def _nothing(record: StepRecord) -> float:
    """Return NaN: a mark is at the axis and has no value."""
    return math.nan


def _of_operand(name: str, share: str) -> Value:
    def percent(record: StepRecord) -> float:
        statistics = (record.narrow_operands or {}).get(name)
        return math.nan if statistics is None else 100 * statistics[share]

    return percent


def _steady(value: Value) -> Value:
    """Exclude the first step, which compiles and allocates, and would flatten the chart."""
    return lambda record: math.nan if record.step == 1 else value(record)


def _norm(record: StepRecord) -> float:
    # A logarithmic axis cannot show 0.
    return record.grad_norm or math.nan


def _line(
    label: str,
    records: Sequence[StepRecord],
    value: Value,
    *,
    smooth: bool = False,
) -> Chart:
    steps = np.array([record.step for record in records], dtype=np.float64)
    values = np.array([value(record) for record in records], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    x, y = (smoothed if smooth else thinned)(steps, values)
    return {
        "label": label,
        "kind": "smooth" if smooth else "line",
        "x": [int(step) for step in x],
        # Six digits are enough for a screen, and take a third of the bytes.
        "y": [None if np.isnan(number) else float(f"{number:.6g}") for number in y],
    }
