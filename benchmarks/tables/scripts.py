"""The table of `benchmarks.known_scripts`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import table
from benchmarks.tables.machine import machine_line

# Where each script is published.
_SOURCES = {
    "nanogpt": "nanoGPT, `train.py`",
    "accelerate": "accelerate, `gradient_accumulation.py`",
    "trl": "TRL, `sft.py`",
}


def known_scripts(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.known_scripts` and a line on versions and machine."""
    rows: list[dict[str, object]] = [
        {
            "script": _SOURCES[name],
            "ranks": ranks,
            "losses": len(found["original"]),
            "first; last": _ends(found["original"]),
            "with distmp": _ends(found["distmp"]),
            "largest difference": f"{largest_difference(found):.1g}",
            "with distmp, float16": _ends(found["distmp, float16"]),
        }
        for name, by_ranks in result["scripts"].items()
        for ranks, found in by_ranks.items()
    ]
    versions = ", ".join(
        f"{name} {number}" for name, number in result["versions"].items() if name != "torch"
    )
    commits = ", ".join(f"{name} {commit[:7]}" for name, commit in result["commits"].items())
    return (
        f"{table(rows)}\n\nFloat32, except for the last column; tiny models with random weights. "
        f"{versions}; scripts of the commits {commits}. {machine_line(result)}"
    )


def _ends(losses: list[float]) -> str:
    return f"{losses[0]:.4f}; {losses[-1]:.4f}"


def largest_difference(found: dict[str, list[float]]) -> float:
    """Return the largest difference of the losses with distmp from those of the original."""
    return max(abs(a - b) for a, b in zip(found["original"], found["distmp"], strict=True))
