"""The table of `benchmarks.loss`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import ratios, table
from benchmarks.tables.machine import machine_line

ALL = "all logits"


def loss(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.loss` and a line on its machine."""
    whole = result["bytes"][ALL]
    rows: list[dict[str, object]] = []
    for name, peak in result["bytes"].items():
        row: dict[str, object] = {
            "loss": name,
            "peak memory": f"{peak / 2**20:,.0f} MiB",
            f"memory / {ALL}": f"{peak / whole:.3f}",
            "error in FP32": f"{max(result['errors'][name].values()):.0e}",
        }
        for what, taken in result["milliseconds"].items():
            row[f"time of {what} / {ALL}"] = (
                ratios(taken[name], taken[ALL]) if name in taken else ""
            )
        rows.append(row)
    return (
        f"{table(rows)}\n\nMemory with {result['tokens']['memory']:,} tokens under bf16 autocast at "
        f"a vocabulary of {result['vocabulary']['memory']:,}; time with {result['tokens']['time']:,} "
        f"tokens at a vocabulary of {result['vocabulary']['time']:,}, median (min to max) of the "
        f"ratios of alternating rounds. Dimension {result['dimension']:,}. The error is the largest "
        "relative error of loss and gradients against float64. " + machine_line(result)
    )
