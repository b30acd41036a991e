"""Tables about the cost and benefit of precision."""

from __future__ import annotations

from typing import Any

from benchmarks.report import table
from benchmarks.tables.machine import machine_line, reached

# Key of `benchmarks.precision`: the changed setting, and the quantity whose error is measured.
ERRORS = {
    "accumulate 8": ("`accumulate=bf16`", "sum of 8 microbatches"),
    "accumulate 64": ("`accumulate=bf16`", "sum of 64 microbatches"),
    "accumulate 512": ("`accumulate=bf16`", "sum of 512 microbatches"),
    "accumulate 512 in FP32": ("`accumulate=fp32`", "sum of 512 microbatches"),
    "reduce once": ("`reduce=bf16`, summed in FP32", "gradient of 64 ranks"),
    "reduce machines": (
        "`reduce=bf16`, summed in FP32",
        "gradient of 64 ranks on 8 machines",
    ),
    "reduce ring": ("`reduce=bf16`, summed in bf16", "gradient of 64 ranks"),
    "param lost": ("`param=bf16`", "share of weights that an update of 3e-4 does not change"),
    "buffer mean": ("`buffer=bf16`", "running mean after 1,000 batches"),
    "output": ("`output=bf16`", "gradient of the cross entropy"),
    "tf32": ("`tf32=true`", "matrix product"),
    "bf16 products": ("`compute=bf16`", "matrix product"),
}


def precision_errors(result: dict[str, Any]) -> str:
    """Return the first table of `benchmarks.precision` and a line on its machine."""
    rows: list[dict[str, object]] = [
        {"policy": change, "quantity": what, "relative error": f"{result['errors'][key]:.2g}"}
        for key, (change, what) in ERRORS.items()
    ]
    return f"{table(rows)}\n\n{machine_line(result)}"


def precision_training(result: dict[str, Any]) -> str:
    """Return the second table of `benchmarks.precision` and a line on its machine."""
    rows: list[dict[str, object]] = [
        {
            "policy": f"`{name.replace('|', chr(92) + '|')}`",
            "last loss": f"{found['last']:.4f}",
            "largest difference from fp32": f"{found['apart']:.2g}",
        }
        for name, found in result["losses"].items()
    ]
    return (
        f"{table(rows)}\n\nLargest relative difference of the loss in {result['steps']} steps. "
        + machine_line(result)
    )


def policies(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.policies` and a line on its machine."""
    rows: list[dict[str, object]] = []
    for name, found in result["policies"].items():
        if "refused" in found:
            continue
        seconds = found["step_seconds"]
        rows.append(
            {
                "policy": f"`{name}`",
                "ms a step": f"{1000 * seconds:.3g}",
                "tokens/s": f"{result['tokens'] / seconds:,.0f}",
                **reached(result, seconds, result["kinds"][name]),
                "peak memory, MB": f"{found['memory_bytes'] / 1e6:,.0f}",
                "last loss": f"{result['last_losses'][name]:.4f}",
                "difference": f"{result['apart'][name]:.2%}",
            }
        )
    return (
        f"{table(rows)}\n\nTransformer of {result['size']} parameters, {result['tokens']:,} tokens "
        f"a step on one rank, {result['steps']} steps; medians. Recommended: "
        f"`{result['recommended']}`, {result['reason']}. {machine_line(result)}"
    )
