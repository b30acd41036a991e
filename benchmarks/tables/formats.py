"""The tables of `benchmarks.narrow_formats` and `benchmarks.lean_state`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import table
from benchmarks.tables.machine import machine_line


def narrow_formats(result: dict[str, Any]) -> str:
    """Return the table of final losses under each policy and a line on the machine."""
    rows = [{"policy": f"`{name}`", **_losses(result, name)} for name in result["losses"]]
    return f"{table(rows)}\n\n{_trained(result)}"


def lean_state(result: dict[str, Any]) -> str:
    """Return the table of final losses and of bytes per parameter, and a line on the machine."""
    rows = [
        {
            "policy and state": f"`{name}`",
            "bytes per parameter": f"{result['bytes'][name]:.2f}",
            **_losses(result, name),
        }
        for name in result["losses"]
    ]
    return f"{table(rows)}\n\nBytes of weights and optimizer state. {_trained(result)}"


def _losses(result: dict[str, Any], name: str) -> dict[str, object]:
    differences = result["differences"][name]
    return {
        "final losses": ", ".join(f"{loss:.4f}" for loss in result["losses"][name]),
        "mean difference from bf16": f"{differences['mean']:+.2%}",
        "largest": f"{differences['largest']:+.2%}",
    }


def _trained(result: dict[str, Any]) -> str:
    return (
        f"Transformer of {result['size']} parameters. Held-out loss in nats per byte after "
        f"{result['steps']} steps of {result['tokens']} tokens, for each seed. The first "
        f"{result['shared']} steps are in bf16. {machine_line(result)}"
    )
