"""Writes the figures of the documents from the kept results: `python -m benchmarks.figures`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peak import share
from benchmarks.report import RESULTS, Spread, table

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def quickstart(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.quickstart` and a line on its machine."""
    speeds = {name: Spread(*values) for name, values in result["tokens_per_second"].items()}
    ratio = Spread(*result["tokens_per_second_of_plain_ddp"])
    rows: list[dict[str, object]] = [
        {"loop": "distmp", "tokens/s": speeds["distmp"], "of plain DDP": ratio},
        {"loop": "plain torch DDP", "tokens/s": speeds["plain"], "of plain DDP": 1},
    ]
    return (
        f"{table(rows)}\n\nMedian (least to most) of {len(result['seconds']['plain'])} alternating "
        f"turns of {result['steps_per_turn']} steps, {result['machine']['cores']} cores of "
        + _machine(result)
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
    return (
        f"{table(rows)}\n\nMedian (least to most) of {len(result['milliseconds']['copy'])} "
        f"alternating turns, {result['elements'] / 1e6:.1f} M FP32 gradient elements; the floor, "
        f"one read of them at copy bandwidth, is {floor:.3g} ms, their norm alone {norm:.3g} ms. "
        f"{_threads(result)}{_machine(result)}"
    )


def accumulation_error(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.accumulation_error` and a line on its machine."""
    rows: list[dict[str, object]] = [
        {
            "accumulator": name,
            **{
                f"{count} microbatches": f"{error:.1e}"
                for count, error in zip(result["microbatches"], errors, strict=True)
            },
        }
        for name, errors in result["relative_error"].items()
    ]
    return (
        f"{table(rows)}\n\nRelative L2 error against a float64 sum of the same bfloat16 microbatch "
        f"gradients, {result['ranks']} ranks, microbatches per rank. {_machine(result)}"
    )


def accumulation_passes(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.accumulation_passes` and a line on its machine."""
    taken = {name: Spread.of(values) for name, values in result["milliseconds"].items()}
    floor = taken.pop("autograd alone").median
    ours = taken["distmp.Fp32GradBuckets"].median - floor
    clock = "GPU" if result["machine"]["gpu"] else "CPU"
    rows: list[dict[str, object]] = []
    for name, spread in taken.items():
        beyond = spread.median - floor
        row: dict[str, object] = {"way": name, f"{clock} ms": spread}
        row["beyond autograd alone, ms"] = f"{beyond:.3g}"
        row["Fp32GradBuckets takes of that"] = f"{ours / beyond:.2f}"
        rows.append(row)
    return (
        f"{table(rows)}\n\nMedian (least to most) of {len(result['milliseconds'][rows[0]['way']])} "
        f"alternating turns of {result['microbatches']} microbatches, "
        f"{result['elements'] / 1e6:.1f} M bfloat16 gradient elements in {result['parameters']} "
        f"parameters; autograd alone, without accumulating, {floor:.3g} ms. "
        f"{_machine(result)}"
    )


def accumulation_step(result: dict[str, Any]) -> str:
    """Return the tables of `benchmarks.accumulation_step` and a line on its machine."""
    seconds = result["seconds"]
    rows: list[dict[str, object]] = []
    for name, measured in result["memory"].items():
        if name not in seconds:
            continue  # left out: it could not be measured on this machine
        spread = Spread.of(seconds[name])
        row: dict[str, object] = {"way": name, "seconds": spread}
        for other in ("autocast", "bf16"):
            reference = seconds.get(result["references"][other])
            ratio = _ratio(seconds[name], reference).median if reference else None
            row[f"of DDP {other}"] = "" if ratio is None else f"{ratio:.2f}"
        row |= reached(result, spread.median, "bfloat16")
        row["peak bytes per parameter"] = f"{measured['peak']:.1f}"
        if "live_tensors_peak" in measured:
            row["live tensors, 2 microbatches"] = f"{measured['live_tensors_peak']:.1f}"
        rows.append(row)
    held: list[dict[str, object]] = []
    for name, by_ranks in result["memory_with_adamw"].items():
        for ranks, measured in by_ranks.items():
            held.append(
                {
                    "optimizer": name,
                    "ranks": ranks,
                    "bytes per parameter between steps": f"{measured['between_steps']:.1f}",
                    "2 + 4 + 12 (/ ranks if sharded)": (
                        f"{6 + 12 / (int(ranks) if 'shard' in name else 1):.0f}"
                    ),
                    "peak": f"{measured['peak']:.1f}",
                }
            )
    return (
        f"{table(rows)}\n\n{table(held)}\n\nMedian (least to most) of "
        f"{len(next(iter(seconds.values())))} alternating turns of one step with "
        f"{result['microbatches']} microbatches of {result['tokens_per_microbatch']} tokens on "
        f"each of {result.get('ranks', 2)} ranks, ratios turn by turn. {_machine(result)}"
    )


def accumulation_microbatches(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.accumulation_microbatches` and a line on its machine."""
    counts = [str(count) for count in result["microbatches"]]
    reference = result["ways"][result["reference"]]
    rows: list[dict[str, object]] = []
    for way, found in result["ways"].items():
        if any(len(one) < 3 or None in one.values() for one in found.values()):
            continue  # left out: it could not be measured on this machine
        ratios = [
            _ratio(found[count]["seconds"], reference[count]["seconds"]).median for count in counts
        ]
        rows.append(
            {
                "way": way,
                "relative error": " / ".join(f"{found[count]['error']:.0e}" for count in counts),
                f"time, of {result['reference']}": " / ".join(f"{one:.2f}" for one in ratios),
                "peak bytes per parameter": " / ".join(
                    f"{found[count]['bytes_per_parameter']:.1f}" for count in counts
                ),
            }
        )
        if peak := result["machine"].get("peak"):
            shares = [
                share(
                    int(count) * result["flops"],
                    Spread.of(found[count]["seconds"]).median,
                    peak,
                    "bfloat16",
                )
                for count in counts
            ]
            rows[-1]["of the peak"] = " / ".join(f"{one:.1%}" for one in shares)
    times = " / ".join(f"{Spread.of(reference[count]['seconds']).median:.3g}" for count in counts)
    return (
        f"{table(rows)}\n\nAt {' / '.join(counts)} microbatches of {result['samples']} samples on "
        f"each of {result['ranks']} ranks; {result['parameters'] / 1e6:.2f} M parameters. Relative "
        "L2 error against the float64 mean of the gradients of single microbatches. Time: median "
        f"of {len(reference[counts[0]]['seconds'])} alternating turns of a step, ratios turn by "
        f"turn; the reference takes {times} s. Memory: tensors alive at once. {_machine(result)}"
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
                "apart": f"{result['apart'][name]:.2%}",
            }
        )
    return (
        f"{table(rows)}\n\nTransformer of {result['size']} parameters, {result['tokens']:,} tokens "
        f"a step on one rank, {result['steps']} steps; medians. Recommended: "
        f"`{result['recommended']}`, {result['reason']}. {_machine(result)}"
    )


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


def _ratio(ours: list[float], theirs: list[float]) -> Spread:
    """Return what of another way's time is ours, turn by turn."""
    return Spread.of([one / other for one, other in zip(ours, theirs, strict=True)])


def reproducible(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.reproducible` and a line on its machine."""
    runs = result["runs"]
    layouts = list(dict.fromkeys(run["layout"] for run in runs))
    rows: list[dict[str, object]] = []
    for policy, mode in dict.fromkeys((run["policy"], run["mode"]) for run in runs):
        digests = {
            run["layout"]: run["digest"]
            for run in runs
            if (run["policy"], run["mode"]) == (policy, mode)
        }
        shown = {layout: f"`{digests[layout][:8]}`" for layout in layouts}
        rows.append({"policy": policy, "mode": mode, **shown})
    first = runs[0]
    return (
        f"{table(rows)}\n\nSHA-256, shortened, of weights, FP32 masters and moments after "
        f"{result['steps']} steps of the quickstart's model with samples of "
        f"{result['sequence_length']} tokens, at ranks x microbatches; {first['skipped']} of the "
        f"steps overflowed and was skipped, {first['clipped']} were clipped. {_machine(result)}"
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


def growth(result: dict[str, Any]) -> str:
    """Return the tables of `benchmarks.growth`."""
    ways = result["ways"]
    tables = []
    for quantity in ("memory", "wire"):
        rows: list[dict[str, object]] = []
        for ranks in next(iter(ways.values())):
            row: dict[str, object] = {f"{quantity} of a rank, MB: ranks": f"{int(ranks):,}"}
            for way, by_ranks in ways.items():
                found = by_ranks[ranks]
                text = f"{found[quantity] / 1e6:.1f}"
                if f"measured_{quantity}" in found:
                    text += f" (real: {found[f'measured_{quantity}'] / 1e6:.1f})"
                row[way] = text
            rows.append(row)
        tables.append(table(rows))
    return (
        "\n\n".join(tables) + f"\n\nPredicted, and in brackets what real steps had; "
        f"{result['samples_per_rank']} samples on every rank, bf16. {_machine(result)}"
    )


def checkpoint_stall(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.checkpoint_stall` and a line on its machine."""
    blocking = [turn["stall"] for turn in result["turns"]["blocking"]]
    rows: list[dict[str, object]] = []
    for way, turns in result["turns"].items():
        stalls = [turn["stall"] for turn in turns]
        slower = _ratio([t["step_while_writing"] for t in turns], [t["step"] for t in turns])
        memory = result["memory"][way]
        rows.append(
            {
                "saving": way,
                "training stands still, s": Spread.of(stalls),
                "of a blocking save": _ratio(stalls, blocking),
                "written after, s": Spread.of([turn["written"] for turn in turns]),
                "step while it is written, of one without": slower if way != "blocking" else "",
                "memory of a rank, of the state": f"{memory['beyond'] / memory['state']:.2f}",
            }
        )
    state = result["memory"]["blocking"]["state"]
    return (
        f"{table(rows)}\n\nMedian (least to most) of {len(blocking)} alternating turns, ratios "
        f"turn by turn. {result['ranks']} ranks share the writing of a state of "
        f"{state / 1e6:.0f} MB. {result['machine']['cores']} cores of {_machine(result)}"
    )


def peers(result: dict[str, Any]) -> str:
    """Return the tables of `benchmarks.peers`."""
    races = [race(name, found, result["tokens"]) for name, found in result["races"].items()]
    turns = len(next(iter(next(iter(result["races"].values())).values()))["seconds"])
    return (
        "\n\n".join(races)
        + f"\n\nTransformer of {result['size']} parameters, {result['ranks']} ranks, "
        f"{result['tokens']:,} tokens a step; median (least to most) of {turns} alternating turns, "
        f"ratios turn by turn. {_machine(result)}"
    )


def race(name: str, found: dict[str, dict[str, Any]], tokens: int) -> str:
    """Return the table of one race of `benchmarks.peers`."""
    first = next(iter(found.values()))
    rows: list[dict[str, object]] = []
    for loop, measured in found.items():
        seconds = measured["seconds"]
        rows.append(
            {
                name: loop,
                "tokens/s": Spread.of([tokens / one for one in seconds]),
                "time, of the first": f"{_ratio(seconds, first['seconds']).median:.2f}",
                "peak memory, MB": f"{measured['memory'] / 1e6:.0f}",
            }
        )
    return table(rows)


def _threads(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return "" if machine["gpu"] else f"{machine['threads']} threads on "


def _machine(result: dict[str, Any]) -> str:
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


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "quickstart-cpu": quickstart,
    "step-tail-cpu": step_tail,
    "explain-memory-cpu": explain_memory,
    "growth-cpu": growth,
    "peers-cpu": peers,
    "accumulation-microbatches-cpu": accumulation_microbatches,
    "accumulation-passes-cpu": accumulation_passes,
    "accumulation-step-cpu": accumulation_step,
    "reproducible-cpu": reproducible,
    "accumulation-error-cpu": accumulation_error,
    "precision-errors-cpu": precision_errors,
    "precision-training-cpu": precision_training,
    "policies-cpu": policies,
    "checkpoint-stall-cpu": checkpoint_stall,
}


def _written(name: str) -> str:
    """Return a kept result for a document; those of a GPU have the form of those of a CPU."""
    writer, kept = WRITERS[re.sub("-cuda$", "-cpu", name)], RESULTS / f"{name}.json"
    return writer(json.loads(kept.read_text())) if kept.exists() else "Not measured yet."


def every_gpu_result() -> str:
    """Return all results of a GPU that are kept, each below its name."""
    names = sorted(path.stem for path in RESULTS.glob("*-cuda.json"))
    found = [f"### {name}\n\n{_written(name)}" for name in names]
    return "\n\n".join(found) or "No result of a GPU is kept yet."


def with_figures(text: str) -> str:
    """Return a document with what stands between its figure marks made anew from the results."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        written = every_gpu_result() if name == "every-gpu-result" else _written(name)
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
