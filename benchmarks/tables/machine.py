"""What tables say of the machine."""

from __future__ import annotations

from typing import Any

from benchmarks.peak import share


def machine_line(result: dict[str, Any]) -> str:
    """Return a line on the machine of a result, its versions and its date."""
    machine = result["machine"]
    versions = f"torch {machine['torch']}, {machine['date']}."
    peak = machine.get("peak")
    if peak is None:
        return f"{machine['gpu'] or machine['cpu']}, {versions}"
    bf16 = peak["flops"]["bfloat16"] / 1e12, peak["product"]["bfloat16"] / 1e12
    return (
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, {versions} Its "
        f"peak in bfloat16 is {bf16[0]:,.0f} TFLOP/s ({peak['source']}), a large product reaches "
        f"{bf16[1]:,.0f}; copies move {peak['bandwidth'] / 1e12:.2f} TB/s."
    )


def threads(result: dict[str, Any]) -> str:
    """Return how many threads a CPU was used with, to stand before the machine."""
    machine = result["machine"]
    return "" if machine["gpu"] else f"{machine['threads']} threads on "


def reached(result: dict[str, Any], seconds: float, kind: str) -> dict[str, object]:
    """Return the columns that say how much of a GPU a step reaches; none for a CPU.

    Args:
        result: With the work of a step of one rank, `flops`.
        seconds: That a step takes.
        kind: Of products (`benchmarks.peak.kind_of`).
    """
    peak = result["machine"].get("peak")
    if peak is None:
        return {}
    return {
        "TFLOP/s": f"{result['flops'] / seconds / 1e12:.3g}",
        "of the peak": f"{share(result['flops'], seconds, peak, kind):.1%}",
    }
