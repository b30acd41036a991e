"""What a race of loops has found: whether they did the same work, as a table, and in words.

A race is what `benchmarks.peers` keeps of it: the dtype to compute in, the losses of a plain FP32
training on the same microbatches, and for each loop its losses, the dtype that it computed in, the
seconds of its turns and its peak memory.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.report import Spread, ratios, table

# How far a loss may be from that of FP32, relative: an eighth of the last bit of what is computed
# in, as it is a mean over many tokens; of FP32 some bits, as a token's loss is a long sum.
TOLERANCE = {"float32": 2.0**-20, "float16": 2.0**-13, "bfloat16": 2.0**-10}

Found = dict[str, Any]


def apart(race: Found, loop: Found) -> float:
    """Return the largest relative distance of a loop's losses from those of FP32."""
    pairs = zip(loop["losses"], race["reference"], strict=True)
    distances = [abs(one - reference) / abs(reference) for one, reference in pairs]
    return math.nan if any(map(math.isnan, distances)) else max(distances)


def check_same_work(name: str, race: Found, loop: Found) -> None:
    """Refuse a loop that has learned something else.

    Raises:
        SystemExit: With the losses.
    """
    tolerance = TOLERANCE[loop["computes"]]
    if not apart(race, loop) <= tolerance:  # which no NaN is
        raise SystemExit(
            f"{name} does not do the same work: losses {loop['losses']} in {loop['computes']}, "
            f"beside {race['reference']} in FP32; they may be {tolerance:.1g} apart, relative"
        )


def rendered(name: str, race: Found) -> str:
    """Return table and decision of a race as Markdown."""
    missing = [f"- {loop} is not there: {reason}." for loop, reason in race["absent"].items()]
    peers = _peers(race)
    if not peers:
        return "\n".join([f"Nobody to compare with in {name}.", "", *missing])
    fastest, leanest = best_peers(race)
    rows: list[dict[str, object]] = []
    for loop, found in race["loops"].items():
        counts = same_dtype(race, found)
        share = ratios(found["seconds"], peers[fastest]["seconds"])
        of_least = found["memory"] / peers[leanest]["memory"]
        rows.append(
            {
                name: loop if counts else f"{loop}: computes in {found['computes']}",
                "tokens/s": Spread.of([race["tokens"] / one for one in found["seconds"]]),
                "time, of the fastest peer": share if counts else "",
                "peak memory, MB": f"{found['memory'] / 1e6:.0f}",
                "of the least": f"{of_least:.2f}" if counts else "",
                "loss, from FP32": f"{apart(race, found):.0e}",
            }
        )
    lines = [
        f"- {loop}: {_speed(found, peers[fastest], fastest)}; "
        f"{_memory(found, peers[leanest], leanest)}."
        for loop, found in race["loops"].items()
        if is_ours(loop)
    ]
    work = f"Transformer of size {race['size']}, {race['tokens']:,} tokens a step."
    return "\n\n".join([table(rows), work, "\n".join([*lines, *missing])])


def best_peers(race: Found) -> tuple[str, str]:
    """Return the fastest of the others that did the same work, and the one with least memory."""
    peers = _peers(race)
    fastest = min(peers, key=lambda loop: Spread.of(peers[loop]["seconds"]).median)
    return fastest, min(peers, key=lambda loop: peers[loop]["memory"])


def _peers(race: Found) -> dict[str, Found]:
    return {
        loop: found
        for loop, found in race["loops"].items()
        if not is_ours(loop) and same_dtype(race, found)
    }


def beside(peer: str, found: dict[str, Found]) -> str:
    """Return what distmp's loops take beside those of one peer, as a Markdown table."""
    rows: list[dict[str, object]] = []
    for name, race in found.items():
        theirs = race["loops"].get(peer)
        for loop, ours in race["loops"].items():
            if theirs is None or not is_ours(loop):
                continue
            row: dict[str, object] = {"race": name, "loop": loop}
            row[f"time, of {peer}'s"] = ratios(ours["seconds"], theirs["seconds"])
            row["memory"] = f"{ours['memory'] / theirs['memory']:.2f}"
            if not same_dtype(race, theirs):
                row |= dict.fromkeys(list(row)[2:], f"{peer} computes in {theirs['computes']}")
            rows.append(row)
    return table(rows)


def is_ours(loop: str) -> bool:
    """Return whether a loop is distmp's."""
    return loop.startswith("distmp")


def same_dtype(race: Found, loop: Found) -> bool:
    """Return whether a loop computed in what it was asked to."""
    return bool(loop["computes"] == race["computes"])


def _speed(ours: Found, theirs: Found, name: str) -> str:
    shares = [one / other for one, other in zip(ours["seconds"], theirs["seconds"], strict=True)]
    percent = round(100 * (ratios(ours["seconds"], theirs["seconds"]).median - 1))
    if percent == 0:
        return f"as fast as the fastest peer, {name}"
    slower = percent > 0
    turns = sum((share > 1) == slower for share in shares)
    return (
        f"{abs(percent)} % {'slower' if slower else 'faster'} than the fastest peer, {name} "
        f"(in {turns} of {len(shares)} turns)"
    )


def _memory(ours: Found, theirs: Found, name: str) -> str:
    percent = round(100 * (ours["memory"] / theirs["memory"] - 1))
    if percent == 0:
        return f"as much memory as the peer with the least, {name}"
    return f"{abs(percent)} % {'more' if percent > 0 else 'less'} memory than the least, {name}"
