"""Read runs, and render the report: one HTML file that contains its charts and style."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distmp import __version__
from distmp.errors import ConfigError
from distmp.models.settings import EMA_PREFIX
from distmp.telemetry.records import StepRecord, read_records
from distmp.training import manifest
from distmp.training.run_directory import RunDirectory
from distmp.utils.settings import read_yaml
from distmp.utils.settings.convert import flat
from distmp.utils.units import bytes_text, duration, per_second, quantity, scale_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The summary shows the mean loss of this many last steps.
LAST_STEPS = 50


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run's directory.

    Attributes:
        name: Name of the directory.
        records: The step records; never empty.
        config: The resolved configuration by dotted name; empty if missing.
        environment: Machine and versions by dotted name; empty if missing.
        low_precision_matmuls: Lines on the low-precision matmuls; empty without any.
    """

    name: str
    records: list[StepRecord]
    config: dict[str, object]
    environment: dict[str, object]
    low_precision_matmuls: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> RecordedRun:
        """Read the directory of a run, finished or not.

        Raises:
            ConfigError: If it contains no step record.
        """
        directory = RunDirectory(path)
        records = read_records(directory.records) if os.path.isfile(directory.records) else []
        if not records:
            raise ConfigError(
                "run_dir",
                str(path),
                f"contains no step; {directory.records.name} is missing or empty",
            )
        config: dict[str, object] = {}
        if directory.config.is_file():
            config = flat(read_yaml(directory.config))
        environment: dict[str, object] = {}
        low_precision = None
        if directory.manifest.is_file():
            last = dict(manifest.read(directory.manifest)[-1])
            last.pop("configuration", None)
            low_precision = last.pop("low_precision_matmuls", None)
            environment = flat(last)
        name = path.resolve().name
        return cls(name, records, config, environment, tuple(_described(low_precision)))

    @property
    def throughput_unit(self) -> str:
        """The unit of `weight_per_second`, such as "tok/s"."""
        return per_second(self.records[-1].unit)

    def summary(self) -> dict[str, str]:
        """Return the most important numbers of the run as text, by name."""
        records, last = self.records, self.records[-1]
        losses = [record.loss for record in records[-LAST_STEPS:] if not record.skipped]
        validated = [r.validation_loss for r in records if r.validation_loss is not None]
        planned = self.config.get("steps")
        seconds = sum(record.step_seconds for record in records)
        return {
            "steps": f"{last.step:,} of {planned:,}"
            if isinstance(planned, int)
            else f"{last.step:,}",
            f"loss, last {min(LAST_STEPS, len(records))} steps": (
                f"{statistics.fmean(losses):.4f}" if losses else "none applied"
            ),
            "best validation loss": f"{min(validated):.4f}" if validated else "not measured",
            "skipped": f"{last.skipped_total:,} steps",
            "loss scale at the end": scale_text(last.loss_scale),
            "throughput, median": (
                f"{quantity(statistics.median(r.weight_per_second for r in records))} "
                f"{self.throughput_unit}"
            ),
            "time in steps": duration(seconds),
            "peak memory of a rank": bytes_text(max(record.memory_bytes for record in records)),
        }


def _described(low_precision: dict[str, Any] | None) -> Iterator[str]:
    """Yield lines from the result of `distmp.quantization.layers.formats_record`."""
    if low_precision is not None:
        layers = low_precision["low_precision"]
        total = len(layers) + len(low_precision["high_precision"])
        yield (
            f"{'; '.join(low_precision['formats'])}; {len(layers)} of {total} linear layers "
            f"have low-precision matmuls, {low_precision['backend']}"
        )
        yield from (
            f"{layer} is in high precision because of {why}"
            for layer, why in low_precision["high_precision"].items()
        )


def as_text(value: object) -> str:
    """Return a setting's value as in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


# With at most this many steps, a smoothed line would coincide with the line itself.
FEW_POINTS = 80
# Lines of more ranks cannot be distinguished.
MAX_RANKS = 16
INCHES = (11.0, 2.4)
# Bases of logarithmic axes.
LOGARITHMS = {"Gradient norm before clipping": 10, "Loss scale": 2}


class Curve(NamedTuple):
    """A line, or single points, of a chart.

    Attributes:
        chart: Title of the chart.
        label: Name of the curve.
        steps: Numbers of the steps.
        values: The values; gaps are NaN.
        style: Style of matplotlib: "-" for a line, a marker for points.
    """

    chart: str
    label: str
    steps: list[int]
    values: list[float]
    style: str = "-"


def image(runs: Sequence[RecordedRun]) -> bytes:
    """Return the charts of one run or of two as a PNG image."""
    buffer = io.BytesIO()
    draw(runs).savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def draw(runs: Sequence[RecordedRun]) -> Figure:
    """Draw the charts of one run or of two."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    charts: dict[str, list[Curve]] = {}
    for run in runs:
        for curve in curves(run):
            label = curve.label if len(runs) == 1 else f"{run.name}, {curve.label}"
            charts.setdefault(curve.chart, []).append(curve._replace(label=label))
    # Names of runs may contain what looks like a formula.
    with rc_context({"text.parse_math": False}):
        figure = Figure((INCHES[0], INCHES[1] * len(charts)), layout="constrained")
        rows = figure.subplots(len(charts), sharex=True, squeeze=False)[:, 0]
        for axes, (title, lines) in zip(rows, charts.items(), strict=True):
            axes.set_title(title, loc="left")
            axes.grid(alpha=0.3)
            if title in LOGARITHMS:
                axes.set_yscale("log", base=LOGARITHMS[title])
            for line in lines:
                axes.plot(line.steps, line.values, line.style, label=line.label, markersize=4)
            if len(lines) > 1:
                axes.legend(fontsize="small")
    return figure


def curves(run: RecordedRun) -> Iterator[Curve]:
    """Yield the curves of a run, in the order of the charts."""
    of_steps = partial(_curve, records=run.records, label="each step")
    yield from of_steps("Loss", value=lambda r: r.loss)
    if len(run.records) > FEW_POINTS:
        (loss,) = of_steps("Loss", value=lambda r: r.loss)
        yield loss._replace(label="smoothed", values=smoothed(loss.values))
    validated = [record for record in run.records if record.validation_loss is not None]
    yield from _curve("Loss", validated, "validation", lambda r: r.validation_loss, "o")
    yield from _metrics(run)
    yield from of_steps("Learning rate", value=lambda r: r.learning_rate)
    # A logarithmic axis cannot show 0.
    yield from of_steps("Gradient norm before clipping", value=lambda r: r.grad_norm or None)
    yield from of_steps("Loss scale", value=lambda r: r.loss_scale)
    skipped = [record for record in run.records if record.skipped]
    yield from _curve(
        "Loss scale", skipped, f"{len(skipped):,} skipped", lambda r: r.loss_scale, "x"
    )
    # The first step compiles and allocates, and would flatten the chart.
    later = [record for record in run.records if record.step > 1]
    unit = run.throughput_unit
    yield from _curve(f"Throughput, {unit}", later, "each step", lambda r: r.weight_per_second)
    yield from _rank_times(run)
    memory = "Peak memory of the first rank, MiB"
    yield from of_steps(memory, value=lambda r: r.memory_bytes / 2**20)


def _curve(
    chart: str,
    records: Sequence[StepRecord],
    label: str,
    value: Callable[[StepRecord], float | None],
    style: str = "-",
) -> Iterator[Curve]:
    """Yield a curve of the records; nothing if there are none."""
    if records:
        found = [value(record) for record in records]
        values = [x if x is not None and math.isfinite(x) else math.nan for x in found]
        yield Curve(chart, label, [record.step for record in records], values, style)


def smoothed(values: Sequence[float]) -> list[float]:
    """Average over a centered window of 1/40 of the run, so that the line does not lag."""
    window = np.ones(2 * (len(values) // 80) + 1)
    known = np.isfinite(values)
    sums = np.convolve(np.where(known, values, 0.0), window, "same")
    counts = np.convolve(known, window, "same")
    return [float(x) for x in np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)]


def _metrics(run: RecordedRun) -> Iterator[Curve]:
    """Yield each metric on held-out data; that of the average is in the same chart."""
    for name in dict.fromkeys(n for r in run.records for n in r.validation_metrics or {}):
        measured = [r for r in run.records if name in (r.validation_metrics or {})]
        chart = f"Held-out {name.removeprefix(EMA_PREFIX)}"
        yield from _curve(chart, measured, name, partial(_metric, name=name), "o")


def _metric(record: StepRecord, name: str) -> float | None:
    return (record.validation_metrics or {}).get(name)


def _rank_times(run: RecordedRun) -> Iterator[Curve]:
    """Yield the compute time of every rank, if ranks were compared."""
    compared = [record for record in run.records if record.rank_seconds]
    ranks = min((len(record.rank_seconds or ()) for record in compared), default=0)
    for rank in range(min(ranks, MAX_RANKS)):
        times = partial(_compute_seconds, rank=rank)
        yield from _curve("Time of each rank without waiting, s", compared, f"rank {rank}", times)


def _compute_seconds(record: StepRecord, rank: int) -> float | None:
    return record.rank_seconds[rank] if record.rank_seconds else None


# Maximum number of listed skipped steps; the records have all of them.
MAX_SKIPPED = 200


def page(runs: Sequence[RecordedRun]) -> str:
    """Return the HTML of a report on one run, or on two side by side.

    All text from the runs is escaped, so that the report shows it and never executes it.
    """
    names = escape(" and ".join(run.name for run in runs))
    style = resources.files("distmp.commands.report").joinpath("report.css").read_text()
    charts = base64.b64encode(image(runs)).decode()
    sections = [
        _section("Summary", _summary(runs)),
        f'<img alt="charts" src="data:image/png;base64,{charts}">',
        *(section for run in runs for section in _of_run(run, runs)),
        _section("Configuration", _configuration(runs)),
        f"<footer>distmp {escape(__version__)}</footer>",
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{names}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{names}</h1>\n{''.join(sections)}\n</main>\n</body>\n</html>\n"
    )


def _of_run(run: RecordedRun, runs: Sequence[RecordedRun]) -> Iterator[str]:
    of = "" if len(runs) == 1 else f" of {run.name}"
    yield _section(f"Low-precision matmuls{of}", _paragraphs(run.low_precision_matmuls))
    yield _section(f"Skipped steps{of}", _skipped(run) or "<p>None.</p>")
    yield _section(f"Out of bounds{of}", _divergence(run))
    pairs = [(name, as_text(value)) for name, value in run.environment.items()]
    yield _section(f"Environment{of}", _folded(f"{len(pairs)} values", ["", ""], pairs))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n" if content else ""


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of escaped texts; nothing without rows."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table>{row(head, "th")}{body}</table></div>' if rows else ""


def _folded(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that is shown on demand; nothing without rows."""
    table = _table(head, rows)
    return f"<details><summary>{title}</summary>{table}</details>" if rows else ""


def _summary(runs: Sequence[RecordedRun]) -> str:
    columns = [run.summary() for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return _table(["", *(run.name for run in runs)], rows)


def _skipped(run: RecordedRun) -> str:
    skipped = [record for record in run.records if record.skipped]
    rows = [
        (f"{record.step:,}", scale_text(record.loss_scale), *_causes(record))
        for record in skipped[:MAX_SKIPPED]
    ]
    more = len(skipped) - MAX_SKIPPED
    rest = f"<p>and {more:,} more, in steps.jsonl</p>" if more > 0 else ""
    return _table(["step", "loss scale", "why", "what to do"], rows) + rest


def _causes(record: StepRecord) -> Iterator[str]:
    overflow = record.overflow or {}
    yield str(overflow.get("diagnosis", "no overflow: no gradients to apply"))
    yield str(overflow.get("advice", ""))


def _divergence(run: RecordedRun) -> str:
    events = [record for record in run.records if record.divergence]
    rows = [(f"{record.step:,}", *_event(record)) for record in events[:MAX_SKIPPED]]
    return _table(["step", "problem", "action"], rows)


def _event(record: StepRecord) -> Iterator[str]:
    divergence = record.divergence or {}
    rollback = divergence.get("rolled_back")
    if rollback is None:
        yield str(divergence.get("problem", ""))
        yield str(divergence.get("action", ""))
    else:
        yield f"step {rollback.get('from_step')}: {rollback.get('problem')}"
        yield f"back to step {rollback.get('to_step')}"


def _configuration(runs: Sequence[RecordedRun]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [(name, *(as_text(run.config.get(name)) for run in runs)) for name in names]
    head = ["", *(run.name for run in runs)]
    different = [row for row in rows if len(set(row[1:])) > 1]
    return _table(head, different) + _folded(f"all {len(rows)} settings", head, rows)
