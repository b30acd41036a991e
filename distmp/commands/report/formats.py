"""The report's section on narrow products: formats, and how well operands fit them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from distmp.commands.report.elements import table
from distmp.commands.report.run import Run
from distmp.telemetry.records import StepRecord

# What the operands of the records are.
OPERANDS = {
    "input": "input in forward",
    "weight": "weight",
    "grad": "output gradient in grad",
    "wgrad_input": "input in wgrad",
    "wgrad_grad": "output gradient in wgrad",
}


def section(run: Run) -> str:
    """Return the HTML of the section; empty for a run without narrow products."""
    narrow = run.narrow_products
    if narrow is None:
        return ""
    total = len(narrow["narrow"]) + len(narrow["wide"])
    text = (
        f"{'; '.join(narrow['formats'])}; {len(narrow['narrow'])} of {total} linear layers have "
        f"narrow products, {narrow['backend']}"
    )
    tables = f"{_operands(run.records)}{_changes(run.records)}{_wide(narrow['wide'])}"
    return f"<p>{escape(text)}</p>{tables}"


def changed(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the records of the steps in which `precision.phases` changed the policy."""
    return [step for last, step in pairwise(records) if step.formats != last.formats]


def share_text(share: float) -> str:
    """Return a share with three digits, such as "0.0125%"."""
    return f"{100 * share:.3g}%"


def _operands(records: Sequence[StepRecord]) -> str:
    measured = [record.narrow_operands for record in records if record.narrow_operands]
    if not measured:
        return ""
    head = ["operand", "saturated", "underflowed", "largest", "most saturated", "most underflowed"]
    found = {name: [step[name] for step in measured if name in step] for name in OPERANDS}
    rows = [(OPERANDS[name], *_over_steps(steps)) for name, steps in found.items() if steps]
    note = (
        f"Shares are means over {len(measured):,} recorded steps. Saturated values include those "
        "that are not finite; underflowed values are rounded to zero. The layers are those with "
        "the largest shares in a step."
    )
    return f"{table(head, rows)}<p>{escape(note)}</p>"


def _over_steps(statistics: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the cells of an operand."""
    count = len(statistics)
    for share in ("saturated", "underflowed"):
        yield share_text(sum(step[share] for step in statistics) / count)
    yield f"{max(float(step['largest']) for step in statistics):.4g}"
    for worst in ("most_saturated", "most_underflowed"):
        layers = [step[worst] for step in statistics if step[worst] is not None]
        layer = max(layers, key=operator.itemgetter("share"), default=None)
        yield "none" if layer is None else f"{layer['layer']}: {share_text(layer['share'])}"


def _changes(records: Sequence[StepRecord]) -> str:
    rows = [(f"{record.step:,}", record.formats or "none") for record in changed(records)]
    return table(["step", "policy of precision.phases from here on"], rows) if rows else ""


def _wide(layers: dict[str, str]) -> str:
    if not layers:
        return ""
    rows = table(["layer", "in the compute dtype because of"], layers.items())
    return f"<details><summary>{len(layers)} wide linear layers</summary>{rows}</details>"
