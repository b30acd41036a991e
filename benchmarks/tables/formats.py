"""The table of `benchmarks.narrow_formats`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import table
from benchmarks.tables.machine import machine_line


def narrow_formats(result: dict[str, Any]) -> str:
    """Return the table of final losses and a line on the machine."""
    rows: list[dict[str, object]] = [
        {
            "policy": f"`{name}`",
            "final losses": ", ".join(f"{loss:.4f}" for loss in losses),
            "mean difference from bf16": f"{result['differences'][name]['mean']:+.2%}",
            "largest": f"{result['differences'][name]['largest']:+.2%}",
        }
        for name, losses in result["losses"].items()
    ]
    return (
        f"{table(rows)}\n\nHeld-out loss in nats per byte after {result['steps']} steps of "
        f"{result['tokens']} tokens, for each seed. The first {result['shared']} steps are in "
        f"bf16. {machine_line(result)}"
    )
