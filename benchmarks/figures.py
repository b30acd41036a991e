"""Writes the figures of the documents from the kept results: `python -m benchmarks.figures`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Spread, table

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "docs" / "explain.md",
    ROOT / "docs" / "precision.md",
)


def quickstart(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.quickstart` and a line on its machine."""
    speeds = {name: Spread(*values) for name, values in result["tokens_per_second"].items()}
    ratio = Spread(*result["tokens_per_second_of_plain_ddp"])
    rows: list[dict[str, object]] = [
        {"loop": "distmp", "tokens/s": speeds["distmp"], "of plain DDP": ratio},
        {"loop": "plain torch DDP", "tokens/s": speeds["plain"], "of plain DDP": 1},
    ]
    machine = result["machine"]
    return (
        f"{table(rows)}\n\nMedian (least to most) of {len(result['seconds']['plain'])} alternating "
        f"turns of {result['steps_per_turn']} steps, {machine['cores']} cores of "
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}."
    )


def step_tail(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.step_tail` and a line on its machine."""
    taken = {name: Spread.of(values) for name, values in result["milliseconds"].items()}
    bare = taken["bare fused AdamW"].median
    stock = taken["torch: unscale, clip, step"].median - bare
    # A copy reads and writes, so one read at its bandwidth is half of it.
    floor = taken.pop("copy").median / 2
    norm = taken.pop("norm alone").median
    rows: list[dict[str, object]] = []
    for name, spread in taken.items():
        beyond = spread.median - bare
        row: dict[str, object] = {"way": name, "ms": spread}
        row["beyond the bare step, ms"] = f"{beyond:.3g}" if beyond else ""
        row["of torch's"] = f"{beyond / stock:.2f}" if beyond else ""
        row["of the floor"] = f"{beyond / floor:.1f}" if beyond else ""
        rows.append(row)
    machine = result["machine"]
    return (
        f"{table(rows)}\n\nMedian (least to most) of {len(result['milliseconds']['copy'])} "
        f"alternating turns, {result['elements'] / 1e6:.1f} M FP32 gradient elements; the floor, "
        f"one read of them at copy bandwidth, is {floor:.3g} ms, their norm alone {norm:.3g} ms. "
        f"{machine['threads']} threads on {machine['gpu'] or machine['cpu']}, "
        f"torch {machine['torch']}, {machine['date']}."
    )


# What `benchmarks.precision` measures one by one, by its key: what is saved, and what it costs.
ERRORS = {
    "accumulate 8": ("`accumulate=bf16`", "sum of 8 microbatches"),
    "accumulate 64": ("`accumulate=bf16`", "sum of 64 microbatches"),
    "accumulate 512": ("`accumulate=bf16`", "sum of 512 microbatches"),
    "accumulate 512 in FP32": ("`accumulate=fp32`", "sum of 512 microbatches"),
    "reduce once": ("`reduce=bf16`, summed in FP32", "gradient of 64 ranks"),
    "reduce ring": ("`reduce=bf16`, summed in bf16", "gradient of 64 ranks"),
    "param lost": ("`param=bf16`", "share of weights that an update of 3e-4 does not move"),
    "buffer mean": ("`buffer=bf16`", "running mean after 1,000 batches"),
    "output": ("`output=bf16`", "gradient of the cross entropy"),
    "tf32": ("`tf32=true`", "matrix product"),
    "bf16 products": ("`compute=bf16`", "matrix product"),
}


def precision_errors(result: dict[str, Any]) -> str:
    """Return the first table of `benchmarks.precision` and a line on its machine."""
    rows: list[dict[str, object]] = [
        {"policy": saving, "of what": what, "relative error": f"{result['errors'][key]:.2g}"}
        for key, (saving, what) in ERRORS.items()
    ]
    return f"{table(rows)}\n\n{_machine(result)}"


def precision_training(result: dict[str, Any]) -> str:
    """Return the second table of `benchmarks.precision` and a line on its machine."""
    rows: list[dict[str, object]] = [
        {
            "policy": f"`{name.replace('|', chr(92) + '|')}`",
            "last loss": f"{found['last']:.4f}",
            "farthest from fp32": f"{found['apart']:.2g}",
        }
        for name, found in result["losses"].items()
    ]
    return (
        f"{table(rows)}\n\nLargest relative distance of the loss in {result['steps']} steps. "
        + _machine(result)
    )


def explain_memory(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.explain_memory`."""
    rows: list[dict[str, object]] = [
        {
            "run": name,
            "policy": f"`{case['policy']}`",
            "ranks": case["ranks"],
            "predicted, MB": f"{case['predicted'] / 1e6:.1f}",
            "measured, MB": f"{case['measured'] / 1e6:.1f}",
            "predicted / measured": f"{case['predicted'] / case['measured']:.3f}",
        }
        for name, case in result["cases"].items()
    ]
    return (
        f"{table(rows)}\n\nMeasured: the most that torch's CPU allocator had given out on the "
        f"first rank in steps 2 to {result['steps']}. {_machine(result)}"
    )


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}."


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "quickstart-cpu": quickstart,
    "step-tail-cpu": step_tail,
    "explain-memory-cpu": explain_memory,
    "precision-errors-cpu": precision_errors,
    "precision-training-cpu": precision_training,
}


def with_figures(text: str) -> str:
    """Return a document with what stands between its figure marks made anew from the results."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        result = json.loads((RESULTS / f"{name}.json").read_text())
        written = WRITERS[name](result)
        return f"<!-- figures: {name} -->\n{written}\n<!-- end of figures -->"

    return re.sub(
        r"<!-- figures: ([\w-]+) -->.*?<!-- end of figures -->", fill, text, flags=re.DOTALL
    )


def main() -> int:
    for document in DOCUMENTS:
        document.write_text(with_figures(document.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
