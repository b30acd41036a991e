"""The README's table: from each benchmark the figure that decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import races
from benchmarks.report import Spread, ratios, table

# A result by the name of its benchmark.
Read = Callable[[str], dict[str, Any]]


def summary(read: Read) -> str:
    """Return the deciding figures of all benchmarks as a table."""
    found = [
        _error(read("accumulation-error")),
        *_races(read("peers")),
        _tail(read("step-tail")),
        _trainer(read("quickstart")),
        _shares(read("accumulation-step")),
        _stall(read("checkpoint-stall")),
        _prediction(read("growth")),
        _bits(read("reproducible")),
    ]
    rows = [
        {"what": what, "distmp": ours, "beside": theirs, "more": f"[{page}](docs/{page}.md)"}
        for what, ours, theirs, page in found
    ]
    return table(rows)


Row = tuple[str, str, str, str]


def _error(result: dict[str, Any]) -> Row:
    last = result["microbatches"][-1]
    errors = result["relative_error"]
    ours = errors["distmp.Fp32GradBuckets"][-1]
    theirs = errors["torch DDP, bf16 parameters, reduced once"][-1]
    return (
        f"error of a gradient of {last} bf16 microbatches, relative to float64",
        f"{ours:.0e}",
        f"{theirs:.0e}, torch DDP with bf16 parameters",
        "accumulation",
    )


def _races(result: dict[str, Any]) -> list[Row]:
    rows = []
    for name in ("ddp bf16", "fsdp bf16"):
        race = result["races"][name]
        fastest, leanest = races.best_peers(race)
        ours = race["loops"]["distmp `bf16`"]
        seconds = ratios(ours["seconds"], race["loops"][fastest]["seconds"])
        share = ours["memory"] / race["loops"][leanest]["memory"]
        rows.append(
            (
                f"a training step, `{name.split()[0]}`, bf16: time; memory",
                f"{seconds.median:.2f}; {share:.2f}",
                f"1; 1, {_named(fastest, leanest)}",
                "peers",
            )
        )
    return rows


def _named(fastest: str, leanest: str) -> str:
    if fastest == leanest:
        return f"{fastest}, the fastest and smallest of its peers"
    return f"{fastest}, the fastest, and {leanest}, the smallest of its peers"


def _tail(result: dict[str, Any]) -> Row:
    taken = {name: Spread.of(values).median for name, values in result["milliseconds"].items()}
    bare = taken["bare fused AdamW"]
    ours, theirs = taken["Engine"] - bare, taken["torch: unscale, clip, step"] - bare
    return (
        "unscale, overflow check and clipping, beyond the optimizer's step",
        f"{ours / theirs:.2f}",
        "1, torch's GradScaler and clip_grad_norm_",
        "peers",
    )


def _trainer(result: dict[str, Any]) -> Row:
    ratio = Spread(*result["tokens_per_second_of_plain_ddp"]).median
    return (
        "tokens per second of the whole trainer",
        f"{ratio:.2f}",
        "1, a plain DDP loop without any of it",
        "peers",
    )


def _shares(result: dict[str, Any]) -> Row:
    whole, shares = (
        result["memory_with_adamw"][way] for way in ("AdamW", "AdamW, shard_optimizer")
    )
    ranks = max(shares, key=int)
    return (
        f"bytes per parameter between steps, `shard_optimizer` on {ranks} ranks",
        f"{shares[ranks]['between_steps']:.1f}",
        f"{whole[ranks]['between_steps']:.1f} unsharded",
        "accumulation",
    )


def _stall(result: dict[str, Any]) -> Row:
    stalls = {way: [turn["stall"] for turn in turns] for way, turns in result["turns"].items()}
    ratio = ratios(stalls["asynchronous"], stalls["blocking"]).median
    return (
        "how long training stands still for a checkpoint",
        f"{ratio:.3f}",
        "1, a blocking save",
        "checkpoints",
    )


def _prediction(result: dict[str, Any]) -> Row:
    shares = [
        found[quantity] / found[f"measured_{quantity}"]
        for by_ranks in result["ways"].values()
        for found in by_ranks.values()
        for quantity in ("memory", "wire")
        if found.get(f"measured_{quantity}") and found[quantity]
    ]
    return (
        "`distmp explain`: memory and bytes sent of a rank, before a run",
        f"{min(shares):.3f} to {max(shares):.3f}",
        "1, real steps on 1, 2 and 4 ranks",
        "explain",
    )


def _bits(result: dict[str, Any]) -> Row:
    runs = [run for run in result["runs"] if run["mode"] == "reproducible"]
    layouts = list(dict.fromkeys(run["layout"] for run in runs))
    different = max(
        len({run["digest"] for run in runs if run["policy"] == policy})
        for policy in {run["policy"] for run in runs}
    )
    return (
        f"different weights after {result['steps']} `reproducible` steps at {', '.join(layouts)} "
        "(ranks x microbatches)",
        str(different),
        f"{len(layouts)} at most",
        "accumulation",
    )
