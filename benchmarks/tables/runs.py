"""Tables about runs: reproducibility, memory, scaling and checkpoints."""

from __future__ import annotations

from typing import Any

from benchmarks.report import Spread, ratios, table
from benchmarks.tables.machine import machine_line


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
        f"steps overflowed and was skipped, {first['clipped']} were clipped. {machine_line(result)}"
    )


def growth(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.growth`: measured numbers of ranks, and two larger ones."""
    rows: list[dict[str, object]] = []
    for method, by_ranks in result["ways"].items():
        for ranks, found in by_ranks.items():
            if ranks == "1" or ("measured_memory" not in found and int(ranks) not in (64, 4096)):
                continue
            row: dict[str, object] = {"method": method, "ranks": f"{int(ranks):,}"}
            for quantity, title in (("memory", "memory"), ("wire", "sent per step")):
                predicted, measured = found[quantity], found.get(f"measured_{quantity}", 0)
                row[f"{title}: predicted, MB"] = f"{predicted / 1e6:.1f}"
                row[f"{title}: predicted / real"] = (
                    f"{predicted / measured:.3f}" if measured else ""
                )
            rows.append(row)
    return (
        f"{table(rows)}\n\n22 M parameters, bf16, {result['samples_per_rank']} samples on every "
        f"rank; real steps on {result['machine']['cores']} cores of {machine_line(result)}"
    )


def checkpoint_stall(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.checkpoint_stall` and a line on its machine."""
    blocking = [turn["stall"] for turn in result["turns"]["blocking"]]
    rows: list[dict[str, object]] = []
    for method, turns in result["turns"].items():
        stalls = [turn["stall"] for turn in turns]
        memory = result["memory"][method]
        rows.append(
            {
                "saving": method,
                "stall of training, s": Spread.of(stalls),
                "stall relative to a blocking save": ratios(stalls, blocking),
                "with slower steps while writing": ratios(time_lost(turns), blocking),
                "written after, s": Spread.of([turn["written"] for turn in turns]),
                "additional memory of a rank, relative to the state": (
                    f"{memory['beyond'] / memory['state']:.2f}"
                ),
            }
        )
    state = result["memory"]["blocking"]["state"]
    return (
        f"{table(rows)}\n\nMedian (min to max) of {len(blocking)} alternating rounds, ratios "
        f"per round. {result['ranks']} ranks write a state of {state / 1e6:.0f} MB together. "
        f"{result['machine']['cores']} cores of {machine_line(result)}"
    )


def time_lost(turns: list[dict[str, float]]) -> list[float]:
    """Return the stall of each turn plus the time by which steps while writing were slower."""
    return [
        turn["stall"]
        + (turn["written"] - turn["stall"]) * (1 - turn["step"] / turn["step_while_writing"])
        for turn in turns
    ]


def muon(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.muon` and a line on its machine."""
    rows: list[dict[str, object]] = []
    for method, by_ranks in result["differences"].items():
        row: dict[str, object] = {"method": method}
        for ranks, found in by_ranks.items():
            row[f"{ranks} ranks"] = f"{found['largest']:.1e} (mean {found['mean']:.1e})"
        rows.append(row)
    return (
        f"{table(rows)}\n\nLargest difference of the first update of a hidden matrix from that on "
        f"one rank, relative to its norm; a transformer with {result['parameters']:,} parameters "
        f"in FP32. {machine_line(result)}"
    )
