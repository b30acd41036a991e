"""The README's table: the headline result of each benchmark, relative to the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import races
from benchmarks.report import Spread, ratios, table

# A result by the name of its benchmark.
Read = Callable[[str], dict[str, Any]]


def summary(read: Read) -> str:
    """Return the headline results of all benchmarks as a table."""
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
        {"result": what, "distmp": ours, "baseline": theirs, "details": f"[{page}](docs/{page}.md)"}
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
        time = races.relative_time(ours, race["loops"][fastest])
        share = ours["memory"] / race["loops"][leanest]["memory"]
        rows.append(
            (
                f"training step, `{name.split()[0]}`, bf16: time; memory",
                f"{time}; {share:.2f}",
                f"1, {fastest}; 1, {leanest}",
                "peers",
            )
        )
    return rows


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
        "tokens per second of the trainer",
        f"{ratio:.2f}",
        "1, a plain DDP loop",
        "peers",
    )


def _shares(result: dict[str, Any]) -> Row:
    full, sharded = (
        result["memory_with_adamw"][method] for method in ("AdamW", "AdamW, shard_optimizer")
    )
    ranks = max(sharded, key=int)
    return (
        f"bytes per parameter between steps, `shard_optimizer` on {ranks} ranks",
        f"{sharded[ranks]['between_steps']:.1f}",
        f"{full[ranks]['between_steps']:.1f} unsharded",
        "accumulation",
    )


def _stall(result: dict[str, Any]) -> Row:
    stalls = {
        method: [turn["stall"] for turn in turns] for method, turns in result["turns"].items()
    }
    ratio = ratios(stalls["asynchronous"], stalls["blocking"]).median
    return (
        "stall of training for a checkpoint",
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
        "`distmp explain`: predicted memory and sent bytes of a rank",
        f"{min(shares):.3f} to {max(shares):.3f}",
        "1, real steps on several ranks",
        "explain",
    )


def _bits(result: dict[str, Any]) -> Row:
    layouts = list(dict.fromkeys(run["layout"] for run in result["runs"]))
    return (
        f"different weights after {result['steps']} `reproducible` steps at {', '.join(layouts)} "
        "(ranks x microbatches)",
        str(_different(result, "reproducible")),
        f"{_different(result, 'ordinary')} without `reproducible`",
        "accumulation",
    )


def _different(result: dict[str, Any], mode: str) -> int:
    """Return the number of different weights over the layouts, of the policy with most of them."""
    runs = [run for run in result["runs"] if run["mode"] == mode]
    return max(
        len({run["digest"] for run in runs if run["policy"] == policy})
        for policy in {run["policy"] for run in runs}
    )
