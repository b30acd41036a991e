"""Render the report: one HTML file that contains its data, style and script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from distmp import __version__
from distmp.commands.report import formats
from distmp.commands.report.charts import charts
from distmp.commands.report.elements import table
from distmp.commands.report.run import Run, as_text
from distmp.telemetry.records import StepRecord
from distmp.utils.units import scale_text

# Maximum number of listed skipped steps; the records have all of them.
MAX_SKIPPED = 200


def page(runs: Sequence[Run]) -> str:
    """Return the HTML of a report on one run, or on two side by side.

    All text from the runs is escaped, so that the report shows it and never executes it.
    """
    names = " and ".join(run.name for run in runs)
    body = "\n".join(
        [
            f"<header><h1>{escape(names)}</h1></header>",
            _section("Summary", _summary(runs)),
            *(
                f'<figure class="chart" data-chart="{i}"></figure>'
                for i in range(len(charts(runs)))
            ),
            *(_section(_titled("Where the time went", run, runs), _profile(run)) for run in runs),
            *(_section(_titled("Formats", run, runs), formats.section(run)) for run in runs),
            *(_section(_titled("Skipped steps", run, runs), _skipped(run)) for run in runs),
            *(_section(_titled("Out of bounds", run, runs), _divergence(run)) for run in runs),
            _section("Configuration", _configuration(runs)),
            *(_section(_titled("Environment", run, runs), _pairs(run.environment)) for run in runs),
            f"<footer>distmp {escape(__version__)}</footer>",
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(names)}</title>\n<style>\n{_asset('report.css')}</style>\n</head>\n<body>\n"
        f'<main>\n{body}\n</main>\n<script type="application/json" id="charts">'
        f"{_embedded(charts(runs))}</script>\n<script>\n{_asset('charts.js')}</script>\n"
        f"</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("distmp.commands.report").joinpath(name).read_text(encoding="utf-8")


def _embedded(data: object) -> str:
    """Return JSON that cannot end the script element that contains it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _titled(title: str, run: Run, runs: Sequence[Run]) -> str:
    return title if len(runs) == 1 else f"{title} of {run.name}"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _summary(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        cards = (
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in runs[0].summary().items()
        )
        return f'<dl class="cards">{"".join(cards)}</dl>'
    columns = [run.summary() for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ((name, *(column.get(name, "") for column in columns)) for name in names)
    return table(["", *(run.name for run in runs)], rows)


def _profile(run: Run) -> str:
    if run.profile is None:
        return ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.profile.notes())
    return f"<p>{escape(run.profile.title)}</p><ul>{notes}</ul>"


def _skipped(run: Run) -> str:
    skipped = [record for record in run.records if record.skipped]
    if not skipped:
        return "<p>None.</p>"
    rows = (
        (f"{record.step:,}", scale_text(record.loss_scale), *_causes(record))
        for record in skipped[:MAX_SKIPPED]
    )
    more = len(skipped) - MAX_SKIPPED
    rest = f"<p>and {more:,} more, in steps.jsonl</p>" if more > 0 else ""
    listed = table(["step", "loss scale", "why", "what to do"], rows)
    return f'<div class="skipped">{listed}</div>{rest}'


def _divergence(run: Run) -> str:
    events = [record for record in run.records if record.divergence]
    rows = ((f"{record.step:,}", *_event(record)) for record in events[:MAX_SKIPPED])
    return table(["step", "problem", "action"], rows) if events else ""


def _event(record: StepRecord) -> Iterator[str]:
    divergence = record.divergence or {}
    rollback = divergence.get("rolled_back")
    if rollback is None:
        yield str(divergence.get("problem", ""))
        yield str(divergence.get("action", ""))
    else:
        yield f"step {rollback.get('from_step')}: {rollback.get('problem')}"
        yield f"back to step {rollback.get('to_step')}"


def _causes(record: StepRecord) -> Iterator[str]:
    overflow = record.overflow or {}
    yield str(overflow.get("diagnosis", "no overflow: no gradients to apply"))
    yield str(overflow.get("advice", ""))


def _configuration(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = {name: [as_text(run.config.get(name)) for run in runs] for name in names}
    head = ["", *(run.name for run in runs)]
    every = table(head, ((name, *values) for name, values in rows.items()))
    if len(runs) == 1:
        return f"<details><summary>{len(rows)} settings</summary>{every}</details>" if rows else ""
    different = [(name, *values) for name, values in rows.items() if len(set(values)) > 1]
    return (
        table(head, different) if different else "<p>No differences.</p>"
    ) + f"<details><summary>all {len(rows)} settings</summary>{every}</details>"


def _pairs(values: dict[str, object]) -> str:
    if not values:
        return ""
    every = table(["", ""], ((name, as_text(value)) for name, value in values.items()))
    return f"<details><summary>{len(values)} values</summary>{every}</details>"
