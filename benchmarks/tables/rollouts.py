"""The table of `benchmarks.rl_mismatch`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.report import table
from benchmarks.tables.machine import machine_line


def rl_mismatch(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.rl_mismatch` and a line on its machine."""
    policies = result["policies"]
    narrowest = statistics.mean(policies["fp16-autocast"]["mean"])
    rows: list[dict[str, object]] = [
        {
            "policy": f"`{policy}`",
            "mean of abs(d)": f"{statistics.mean(found['mean']):.1e}",
            "relative to float16": f"{statistics.mean(found['mean']) / narrowest:.2g}",
            "largest abs(d)": f"{max(found['max']):.1e}",
            "divergence": f"{statistics.mean(found['kl']):.1e}",
        }
        for policy, found in policies.items()
    ]
    entropy = statistics.mean(policies["fp32"]["entropy"])
    return (
        f"{table(rows)}\n\n`d` is the log-probability of a sampled token in the trainer minus that "
        f"at sampling, in natural units, over {result['steps']} steps of {result['sequences']} "
        f"completions of up to {result['tokens']} tokens; the entropy of a token is "
        f"{entropy:.1f}. {machine_line(result)}"
    )
