"""Read runs, and render the report: one HTML file that contains its charts and style."""

from __future__ import annotations

import base64
import io
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from distmp import __version__
from distmp.errors import require
from distmp.models.settings import EMA_PREFIX
from distmp.telemetry.records import StepRecord, read_records
from distmp.training.run_directory import RunDirectory, read_starts
from distmp.utils.settings import flat, value_text
from distmp.utils.settings.yaml_files import read_yaml
from distmp.utils.units import bytes_text, duration, per_second, quantity, scale_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The summary shows the mean loss of this many last steps.
LAST_STEPS = 50
# Maximum number of listed skipped steps; the records have all of them.
MAX_SKIPPED = 200


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run's directory.

    Attributes:
        name: Name of the directory.
        records: The step records; never empty.
        config: The resolved configuration by dotted name; empty if missing.
        environment: Machine and versions by dotted name; empty if missing.
    """

    name: str
    records: list[StepRecord]
    config: dict[str, object]
    environment: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> RecordedRun:
        """Read the directory of a run, finished or not.

        Raises:
            ConfigError: If it contains no step record.
        """
        directory = RunDirectory(path)
        records = read_records(directory.records) if os.path.isfile(directory.records) else []
        problem = f"contains no step; {directory.records.name} is missing or empty"
        require(len(records) > 0, "run_dir", str(path), problem)
        config = flat(read_yaml(directory.config)) if directory.config.is_file() else {}
        environment: dict[str, str] = {}
        if directory.manifest.is_file():
            last = dict(read_starts(directory.manifest)[-1])
            last.pop("configuration", None)
            last.pop("low_precision_matmuls", None)
            environment = {name: value_text(value) for name, value in flat(last).items()}
        return cls(path.resolve().name, records, config, environment)

    @property
    def throughput_unit(self) -> str:
        """The unit of `weight_per_second`, such as "tok/s"."""
        return per_second(self.records[-1].unit)

    def summary(self) -> dict[str, str]:
        """Return the most important numbers of the run as text, by name."""
        records, last = self.records, self.records[-1]
        losses = [record.loss for record in records[-LAST_STEPS:] if not record.skipped]
        losses_of_validation = (r.validation_loss for r in records)
        validated = [v for v in losses_of_validation if v is not None and not math.isnan(v)]
        planned = self.config.get("steps")
        of_planned = f" of {planned:,}" if isinstance(planned, int) else ""
        return {
            "steps": f"{last.step:,}{of_planned}",
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
            "time in steps": duration(sum(record.step_seconds for record in records)),
            "peak memory of a rank": bytes_text(max(record.memory_bytes for record in records)),
        }

    def skipped(self) -> list[tuple[str, ...]]:
        """Return step, loss scale, cause and advice of each skipped step."""
        records = [record for record in self.records if record.skipped]
        rows: list[tuple[str, ...]] = []
        for record in records[:MAX_SKIPPED]:
            overflow = record.overflow or {}
            out_of_bounds = (record.divergence or {}).get("problem")
            cause = overflow.get("diagnosis") or out_of_bounds or "no gradients to apply"
            scale = scale_text(record.loss_scale)
            rows.append((f"{record.step:,}", scale, cause, overflow.get("advice", "")))
        more = len(records) - MAX_SKIPPED
        return [*rows, (f"and {more:,} more, in steps.jsonl",)] if more > 0 else rows


INCHES = (11.0, 2.4)
# Bases of logarithmic axes.
LOGARITHMS = {"Gradient norm before clipping": 10, "Loss scale": 2}


# Title of the chart, label, value of a record (None: no point), and style of matplotlib.
Curve = tuple[str, str, Callable[[StepRecord], float | None], str]


def image(runs: Sequence[RecordedRun]) -> bytes:
    """Return the charts of one run or of two as a PNG image."""
    buffer = io.BytesIO()
    draw(runs).savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def draw(runs: Sequence[RecordedRun]) -> Figure:
    """Draw the charts of one run or of two."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    charts: dict[str, list[tuple[str, dict[int, float], str]]] = {}
    for run in runs:
        for title, label, value, style in curves(run):
            name = label if len(runs) == 1 else f"{run.name}, {label}"
            values = {r.step: found for r in run.records if (found := value(r)) is not None}
            points = {step: x if math.isfinite(x) else math.nan for step, x in values.items()}
            if points:
                charts.setdefault(title, []).append((name, points, style))
    # Names of runs may contain what looks like a formula.
    with rc_context({"text.parse_math": False}):
        figure = Figure((INCHES[0], INCHES[1] * len(charts)), layout="constrained")
        rows = figure.subplots(len(charts), sharex=True, squeeze=False)[:, 0]
        for axes, (title, lines) in zip(rows, charts.items(), strict=True):
            axes.set_title(title, loc="left")
            axes.grid(alpha=0.3)
            if title in LOGARITHMS:
                axes.set_yscale("log", base=LOGARITHMS[title])
            for name, points, style in lines:
                axes.plot([*points], [*points.values()], style, label=name, markersize=4)
            if len(lines) > 1:
                axes.legend(fontsize="small")
    return figure


def curves(run: RecordedRun) -> Iterator[Curve]:
    """Yield the curves of a run, in the order of the charts."""
    each = "each step"
    yield "Loss", each, lambda r: r.loss, "-"
    yield "Loss", "validation", lambda r: r.validation_loss, "o"
    for name in dict.fromkeys(n for r in run.records for n in r.validation_metrics or {}):
        # The metric of the average is in the same chart.
        title = f"Held-out {name.removeprefix(EMA_PREFIX)}"
        yield title, name, partial(_metric, name=name), "o"
    yield "Learning rate", each, lambda r: r.learning_rate, "-"
    # A logarithmic axis cannot show 0.
    yield "Gradient norm before clipping", each, lambda r: r.grad_norm or math.nan, "-"
    yield "Loss scale", each, lambda r: r.loss_scale, "-"
    skipped = f"{sum(record.skipped for record in run.records):,} skipped"
    yield "Loss scale", skipped, lambda r: r.loss_scale if r.skipped else None, "x"
    # The first step compiles and allocates, and would flatten the chart.
    throughput = f"Throughput, {run.throughput_unit}"
    yield throughput, each, lambda r: r.weight_per_second if r.step > 1 else None, "-"
    yield "Peak memory of the first rank, MiB", each, lambda r: r.memory_bytes / 2**20, "-"


def _metric(record: StepRecord, name: str) -> float | None:
    return (record.validation_metrics or {}).get(name)


def page(runs: Sequence[RecordedRun]) -> str:
    """Return the HTML of a report on one run, or on two side by side."""
    from jinja2 import Template

    columns = [{name: value_text(value) for name, value in run.config.items()} for run in runs]
    settings = _rows(columns, "null")
    template = resources.files("distmp.commands.report").joinpath("report.html").read_text()
    return Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        title=" and ".join(run.name for run in runs),
        runs=runs,
        names=["", *(run.name for run in runs)],
        summary=_rows([run.summary() for run in runs], ""),
        charts=base64.b64encode(image(runs)).decode(),
        settings=settings,
        different=[row for row in settings if len(set(row[1:])) > 1],
        version=__version__,
    )


def _rows(columns: Sequence[Mapping[str, str]], missing: str) -> list[tuple[str, ...]]:
    """Return a row for each name in any column: the name, and its value in each column."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, missing) for column in columns)) for name in names]
