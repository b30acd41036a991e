"""Text and columns about the machine."""

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
    """Return the number of CPU threads, as a prefix of the machine's name."""
    machine = result["machine"]
    return "" if machine["gpu"] else f"{machine['threads']} threads on "


def reached(result: dict[str, Any], seconds: float, kind: str) -> dict[str, object]:
    """Return the columns with the share of a GPU's peak that a step reaches; none for a CPU.

    Args:
        result: A result with the work of a step of one rank, `flops`.
        seconds: Duration of a step.
        kind: Kind of product, see `benchmarks.peak.kind_of`.
    """
    peak = result["machine"].get("peak")
    if peak is None:
        return {}
    return {
        "TFLOP/s": f"{result['flops'] / seconds / 1e12:.3g}",
        "share of the peak": f"{share(result['flops'], seconds, peak, kind):.1%}",
    }
