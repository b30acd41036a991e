"""The table of `benchmarks.start_up`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import ratios, table
from benchmarks.tables.machine import machine_line


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
