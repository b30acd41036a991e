"""The table of `benchmarks.loss`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import ratios, table
from benchmarks.tables.machine import machine_line


def loss(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.loss` and a line on its machine."""
    whole = result["bytes"]["all logits"]
    rows: list[dict[str, object]] = []
    for name, peak in result["bytes"].items():
        row: dict[str, object] = {
            "loss": name,
            f"peak memory, vocabulary {result['vocabulary']['memory']:,}": (
                f"{peak / 2**20:,.0f} MiB ({whole / peak:.1f} times less)"
                if peak != whole
                else f"{peak / 2**20:,.0f} MiB"
            ),
        }
        for what, taken in result["milliseconds"].items():
            row[f"time of {what} / with all logits"] = ratios(taken[name], taken["all logits"])
        rows.append(row)
    return (
        f"{table(rows)}\n\nMemory with {result['tokens']['memory']:,} tokens under bf16 autocast; "
        f"time with {result['tokens']['time']:,} tokens at a vocabulary of "
        f"{result['vocabulary']['time']:,}, median (min to max) of the ratios of alternating "
        f"rounds. Dimension {result['dimension']:,}. {machine_line(result)}"
    )
