"""The result of a race, a comparison of loops: check for the same work, table and text.

A race is a result of `benchmarks.peers`: the requested compute dtype, the losses of a plain FP32
training on the same microbatches, and for each loop its losses, its compute dtype, the seconds of
its turns and its peak memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.report import Spread, ratios, relative, table

# Largest accepted relative difference of a loss from FP32: an eighth of the last bit of the 16-bit
# dtypes, because it is a mean over many tokens; some bits of FP32, because a loss is a long sum.
TOLERANCE = {"float32": 2.0**-20, "float16": 2.0**-13, "bfloat16": 2.0**-10}

Result = dict[str, Any]


def loss_difference(race: Result, loop: Result) -> float:
    """Return the largest relative difference of a loop's losses from FP32."""
    pairs = zip(loop["losses"], race["reference"], strict=True)
    differences = [abs(one - reference) / abs(reference) for one, reference in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def check_same_work(name: str, race: Result, loop: Result) -> None:
    """Check that a loop has the losses of the reference.

    Raises:
        SystemExit: If it has not, with the losses.
    """
    tolerance = TOLERANCE[loop["computes"]]
    if not loss_difference(race, loop) <= tolerance:  # also true for NaN
        raise SystemExit(
            f"{name} does not do the same work: losses {loop['losses']} in {loop['computes']}, "
            f"but {race['reference']} in FP32; they may differ by {tolerance:.1g}, relative"
        )


def excluded(races: Mapping[str, Result]) -> str:
    """Return a line for each reason why loops are missing in races, as Markdown; "" without one."""
    loops: dict[str, dict[str, list[str]]] = {}
    for name, race in races.items():
        for loop, reason in race["absent"].items():
            loops.setdefault(reason, {}).setdefault(loop, []).append(name)
    lines = []
    for reason, by_loop in loops.items():
        missing = [f"{loop} ({', '.join(names)})" for loop, names in by_loop.items()]
        lines.append(f"- Excluded, because {reason}: {', '.join(missing)}.")
    return "\n".join(lines)


def rendered(name: str, race: Result) -> str:
    """Return the table of a race as Markdown."""
    peers = _peers(race)
    if not peers:
        return f"No peers to compare with in {name}."
    fastest, smallest = best_peers(race)
    rows: list[dict[str, object]] = []
    for loop, result in race["loops"].items():
        counts = same_dtype(race, result)
        time_ratio = relative_time(result, peers[fastest]) if loop != fastest else "1"
        memory_ratio = result["memory"] / peers[smallest]["memory"]
        rows.append(
            {
                f"{name}, {race['size']}": loop
                if counts
                else f"{loop}: computes in {result['computes']}",
                "tokens/s": f"{race['tokens'] / Spread.of(result['seconds']).median:,.0f}",
                "time relative to the fastest peer": time_ratio if counts else "",
                "peak memory, MB": f"{result['memory'] / 1e6:.0f}",
                "memory relative to the smallest peer": f"{memory_ratio:.2f}" if counts else "",
                "loss difference from FP32": f"{loss_difference(race, result):.0e}",
            }
        )
    return table(rows)


def best_peers(race: Result) -> tuple[str, str]:
    """Return the fastest peer with the same compute dtype, and the one with the least memory."""
    peers = _peers(race)
    first = next(iter(peers.values()))["seconds"]
    fastest = min(peers, key=lambda loop: ratios(peers[loop]["seconds"], first).median)
    return fastest, min(peers, key=lambda loop: peers[loop]["memory"])


def relative_time(ours: Result, theirs: Result) -> str:
    """Return the ratio of two loops' times per round: its median, and the interval of that."""
    return relative(ours["seconds"], theirs["seconds"])


def _peers(race: Result) -> dict[str, Result]:
    return {
        loop: result
        for loop, result in race["loops"].items()
        if not is_ours(loop) and same_dtype(race, result)
    }


def is_ours(loop: str) -> bool:
    """Return whether a loop is distmp's."""
    return loop.startswith("distmp")


def same_dtype(race: Result, loop: Result) -> bool:
    """Return whether a loop computed in the requested dtype."""
    return bool(loop["computes"] == race["computes"])
