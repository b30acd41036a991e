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
    tokens, vocabulary = result["tokens"], result["vocabulary"]
    return (
        f"{table(rows)}\n\nMemory with {tokens['memory']:,} tokens under bf16 autocast at a "
        f"vocabulary of {vocabulary['memory']:,}; time with {tokens['time']:,} tokens at a "
        f"vocabulary of {vocabulary['time']:,}, median (min to max) of the ratios of alternating "
        f"rounds. Dimension {result['dimension']:,}. The error is the largest relative error of "
        f"loss and gradients against float64. {machine_line(result)}"
    )


def activation_checkpointing(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.activation_checkpointing` and a line on its machine."""
    whole, base = result["bytes"]["none"], result["seconds"]["none"]
    rows = [
        {
            "`activation_checkpointing`": f"`{name}`",
            "peak memory": f"{peak / 2**20:,.0f} MiB",
            "memory / none": f"{peak / whole:.2f}",
            "time / none": ratios(result["seconds"][name], base),
        }
        for name, peak in result["bytes"].items()
    ]
    return (
        f"{table(rows)}\n\nForward and backward of a transformer of size {result['size']} under "
        f"bf16 autocast with {result['tokens']:,} tokens in samples of {result['length']:,}. "
        "Memory is the peak of live tensors with gradients, without parameters; time is the median "
        f"(min to max) of the ratios of alternating rounds. {machine_line(result)}"
    )
