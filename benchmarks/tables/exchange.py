"""The table of `benchmarks.exchange`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import ratios, table
from benchmarks.tables.machine import machine_line


def exchange(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.exchange` and a line on its machine."""
    per_machine = result["ranks_per_machine"]
    rows: list[dict[str, object]] = []
    for method, by_ranks in result["methods"].items():
        kind = "float32, pairwise" if "reproducible" in method else "bfloat16"
        for ranks, found in by_ranks.items():
            before, now = found["before"], found["now"]
            times = result["milliseconds"][kind][ranks]
            ring = 4 * (int(ranks) - 1) / int(ranks) / per_machine
            rows.append(
                {
                    "method": method,
                    "ranks": f"{int(ranks):,}",
                    "launches of a step": _both(before, now, "launches", ",d"),
                    "of these in sums": _both(before, now, "launches_of_sums", ",d"),
                    "bytes of memory": _both(before, now, "memory", ".2f"),
                    "bytes between machines": (
                        _both(before, now, "network", ".2f") if before["network"] else ""
                    ),
                    "FP32 ring": f"{ring:.2f}" if before["network"] else "",
                    "time of a sum / before": ratios(times["now"], times["before"]),
                }
            )
    return (
        f"{table(rows)}\n\nFormer exchange -> this exchange, in a step with one microbatch; 22 M "
        f"parameters, {per_machine} ranks on every machine, each with a network card. Bytes are "
        "those of a rank per gradient element: `bytes of memory` that sums read and write, `bytes "
        "between machines` that the reduction of gradients sends, and `FP32 ring` that a "
        "reduce-scatter along an FP32 ring sends. Time of the sum of a bucket: median (min to max) "
        f"of the ratios of alternating rounds. {machine_line(result)}"
    )


def _both(before: dict[str, Any], now: dict[str, Any], name: str, form: str) -> str:
    return f"{before[name]:{form}} -> {now[name]:{form}}"
