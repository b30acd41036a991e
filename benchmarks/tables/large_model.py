"""The tables of `benchmarks.large_model` and `benchmarks.start_up`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import ratios, table
from benchmarks.tables.machine import machine_line


def large_model(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.large_model` and a line on its machine."""
    runs = result["runs"]
    rows: list[dict[str, object]] = []
    for name, run in runs.items():
        row: dict[str, object] = {"version": f"{name} ({run['commit']})"}
        for ranks in ("largest rank", "all ranks"):
            row[f"peak memory, {ranks}"] = f"{run[ranks] / 2**30:.1f} GiB"
            if "baseline" in runs:
                row[f"{ranks}, relative"] = f"{run[ranks] / runs['baseline'][ranks]:.2f}"
        rows.append(row)
    return (
        f"{table(rows)}\n\n{result['parameters'] / 1e9:.2f} B parameters, {result['ranks']} ranks, "
        f"{result['steps']} steps, `strategy: fsdp`, precision `bf16`, SGD without momentum, from "
        "a folder with several files to a folder with a model of transformers. "
        f"{machine_line(result)}"
    )


def start_up(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.start_up` and a line on its machine."""
    rows: list[dict[str, object]] = []
    own = result["loops"]["distmp"]
    for name, loop in result["loops"].items():
        rows.append(
            {
                "start": name,
                "peak of the first rank": f"{max(loop['first']) / 2**20:,.0f} MiB",
                "peak of the other ranks": f"{max(loop['others']) / 2**20:,.0f} MiB",
                "first rank / distmp": ratios(loop["first"], own["first"]),
                "time / distmp": ratios(loop["seconds"], own["seconds"]),
            }
        )
    return (
        f"{table(rows)}\n\n{result['parameters'] / 1e6:.0f} M parameters in {result['files']} bf16 "
        f"files, FP32 shards on {result['ranks']} ranks; memory in addition to that after imports, "
        f"without file-backed pages. Median (min to max) of {len(own['seconds'])} alternating "
        "rounds. "
        f"{', '.join(f'{name} {version}' for name, version in result['versions'].items())}; "
        f"{machine_line(result)}"
    )
