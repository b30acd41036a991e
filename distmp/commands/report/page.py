"""Render the report: one HTML file that contains its charts and style."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

from distmp import __version__
from distmp.commands.report.charts import image
from distmp.commands.report.run import Run, as_text
from distmp.telemetry.records import StepRecord
from distmp.utils.units import scale_text

# Maximum number of listed skipped steps; the records have all of them.
MAX_SKIPPED = 200


def page(runs: Sequence[Run]) -> str:
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


def _of_run(run: Run, runs: Sequence[Run]) -> Iterator[str]:
    of = "" if len(runs) == 1 else f" of {run.name}"
    yield _section(f"Low-precision matmuls{of}", _paragraphs(run.narrow_products))
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


def _summary(runs: Sequence[Run]) -> str:
    columns = [run.summary() for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return _table(["", *(run.name for run in runs)], rows)


def _skipped(run: Run) -> str:
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


def _divergence(run: Run) -> str:
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


def _configuration(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [(name, *(as_text(run.config.get(name)) for run in runs)) for name in names]
    head = ["", *(run.name for run in runs)]
    different = [row for row in rows if len(set(row[1:])) > 1]
    return _table(head, different) + _folded(f"all {len(rows)} settings", head, rows)
