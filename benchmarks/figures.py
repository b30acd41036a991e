"""Update the tables of the documents from the saved results: `python -m benchmarks.figures`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS
from benchmarks.tables import (
    accumulation,
    formats,
    loss,
    precision,
    rollouts,
    runs,
    scripts,
    start_up,
    steps,
)
from benchmarks.tables.summary import summary

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "quickstart": steps.quickstart,
    "step-tail": steps.step_tail,
    "host-cost": steps.host_cost,
    "predicted-step": steps.predicted_step,
    "peers": steps.peers,
    "accumulation-error": accumulation.accumulation_error,
    "accumulation-passes": accumulation.accumulation_passes,
    "accumulation-step": accumulation.accumulation_step,
    "accumulation-microbatches": accumulation.accumulation_microbatches,
    "precision-errors": precision.precision_errors,
    "precision-training": precision.precision_training,
    "lean-state": formats.lean_state,
    "narrow-formats": formats.narrow_formats,
    "policies": precision.policies,
    "loss": loss.loss,
    "activation-checkpointing": loss.activation_checkpointing,
    "reproducible": runs.reproducible,
    "muon": runs.muon,
    "rl-mismatch": rollouts.rl_mismatch,
    "known-scripts": scripts.known_scripts,
    "growth": runs.growth,
    "checkpoint-stall": runs.checkpoint_stall,
    "start-up": start_up.start_up,
}
# The name of a mark or of a saved result: table, size of the model if not the default, and device.
NAME = re.compile(r"(?P<table>[\w-]+?)(?P<size>-[\d.]+[mb])?-(?P<device>cpu|cuda)")


def figure(name: str) -> str:
    """Return the text between the marks of a name in documents, generated from the results."""
    if name == "every-gpu-result":
        return _every_gpu_result()
    parts = NAME.fullmatch(name)
    assert parts is not None, f"no figure has the name {name}"
    kind, size, device = parts["table"], parts["size"] or "", parts["device"]
    try:
        if kind == "summary":
            return summary(lambda result: _read(f"{result}-{device}"))
        return TABLES[kind](_read(f"{kind}{size}-{device}"))
    except FileNotFoundError:
        return "Not measured yet."


def _every_gpu_result() -> str:
    """Return the tables of all saved GPU results, each below its name."""
    names = sorted(path.stem for path in RESULTS.glob("*-cuda.json"))
    sections = [f"### {name}\n\n{figure(name)}" for name in names]
    return "\n\n".join(sections) or "No GPU results are available yet."


def _read(result: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{result}.json").read_text())
    return content


def with_figures(text: str) -> str:
    """Return a document with the text between its figure marks regenerated from the results."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- figures: {name} -->\n{figure(name)}\n<!-- end of figures -->"

    return re.sub(
        r"<!-- figures: ([\w.-]+) -->.*?<!-- end of figures -->", fill, text, flags=re.DOTALL
    )


def main() -> int:
    for document in DOCUMENTS:
        document.write_text(with_figures(document.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
