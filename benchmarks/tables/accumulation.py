"""Tables about accumulation and reduction of gradients."""

from __future__ import annotations

from typing import Any

from benchmarks.peak import share
from benchmarks.report import Spread, ratios, table
from benchmarks.tables.machine import machine_line, reached


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
        f"gradients, {result['ranks']} ranks, microbatches per rank. {machine_line(result)}"
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
        row: dict[str, object] = {"method": name, f"{clock} ms": spread}
        row["bytes per element and microbatch"] = f"{result['bytes'][name]:.3g}"
        row["beyond autograd alone, ms"] = f"{beyond:.3g}"
        row["time of Fp32GradBuckets / time of this method"] = f"{ours / beyond:.2f}"
        rows.append(row)
    turns = len(result["milliseconds"]["autograd alone"])
    return (
        f"{table(rows)}\n\nMedian (min to max) of {turns} "
        f"alternating rounds of {result['microbatches']} microbatches, "
        f"{result['elements'] / 1e6:.1f} M bfloat16 gradient elements in {result['parameters']} "
        f"parameters; autograd alone, without accumulating, {floor:.3g} ms. "
        f"{machine_line(result)}"
    )


def accumulation_step(result: dict[str, Any]) -> str:
    """Return the tables of `benchmarks.accumulation_step` and a line on its machine."""
    seconds = result["seconds"]
    rows: list[dict[str, object]] = []
    for name, measured in result["memory"].items():
        if name not in seconds:
            continue  # not measured on this machine
        spread = Spread.of(seconds[name])
        row: dict[str, object] = {"method": name, "seconds": spread}
        for other in ("autocast", "bf16"):
            reference = seconds.get(result["references"][other])
            ratio = ratios(seconds[name], reference).median if reference else None
            row[f"relative to DDP {other}"] = "" if ratio is None else f"{ratio:.2f}"
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
        f"{table(rows)}\n\n{table(held)}\n\nMedian (min to max) of "
        f"{len(next(iter(seconds.values())))} alternating rounds of one step with "
        f"{result['microbatches']} microbatches of {result['tokens_per_microbatch']} tokens on "
        f"each of {result.get('ranks', 2)} ranks, ratios per round. {machine_line(result)}"
    )


def accumulation_microbatches(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.accumulation_microbatches` and a line on its machine."""
    counts = [str(count) for count in result["microbatches"]]
    reference = result["ways"][result["reference"]]
    rows: list[dict[str, object]] = []
    for method, found in result["ways"].items():
        if any(len(one) < 3 or None in one.values() for one in found.values()):
            continue  # not measured on this machine
        time_ratios = [
            ratios(found[count]["seconds"], reference[count]["seconds"]).median for count in counts
        ]
        rows.append(
            {
                "method": method,
                "relative error": " / ".join(f"{found[count]['error']:.0e}" for count in counts),
                f"time relative to {result['reference']}": " / ".join(
                    f"{one:.2f}" for one in time_ratios
                ),
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
            rows[-1]["share of the peak"] = " / ".join(f"{one:.1%}" for one in shares)
    times = " / ".join(f"{Spread.of(reference[count]['seconds']).median:.3g}" for count in counts)
    return (
        f"{table(rows)}\n\nAt {' / '.join(counts)} microbatches of {result['samples']} samples on "
        f"each of {result['ranks']} ranks; {result['parameters'] / 1e6:.2f} M parameters. Relative "
        "L2 error against the float64 mean of the gradients of single microbatches. Time: median "
        f"of {len(reference[counts[0]]['seconds'])} alternating rounds of a step, ratios per "
        f"round; the reference takes {times} s. Memory: peak of live tensors. "
        + machine_line(result)
    )
