"""The README's table: the headline result of each benchmark, relative to the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import races
from benchmarks.report import Spread, ratios, relative, table
from benchmarks.tables import runs, steps

# A result by the name of its benchmark.
Read = Callable[[str], dict[str, Any]]


def summary(read: Read) -> str:
    """Return the headline results of all benchmarks as a table."""
    found = [
        _error(read("accumulation-error")),
        _accumulation(read("accumulation-step")),
        *_races(read("peers")),
        _tail(read("step-tail")),
        _trainer(read("quickstart")),
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
    stock = errors["torch DDP, bf16 parameters, reduced once"][-1]
    careful = errors["FSDP2, fp32 reduce, reduced once"][-1]
    return (
        f"relative gradient error of {last} bf16 microbatches",
        f"{ours:.0e}",
        f"{stock:.0e}, torch DDP with bf16 parameters; {careful:.0e}, FSDP2 reducing in FP32",
        "accumulation",
    )


def _accumulation(result: dict[str, Any]) -> Row:
    stock, ours = result["references"]["bf16"], "distmp.Engine, bf16, FP32 masters"
    time = relative(result["seconds"][ours], result["seconds"][stock])
    memory = result["memory"][ours]["peak"] / result["memory"][stock]["peak"]
    return (
        "such a step: time; memory, with FP32 masters",
        f"{time}; {memory:.2f}",
        "1, the same DDP without masters",
        "benchmarks",
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
                f"1; 1, {fastest}" if leanest == fastest else f"1, {fastest}; 1, {leanest}",
                "peers",
            )
        )
    return rows


def _tail(result: dict[str, Any]) -> Row:
    taken = steps.beyond_bare(result)
    engine, scaler = (
        relative(taken[name], taken[steps.STOCK])
        for name in ("Engine", "DistributedGradScaler.clip_grad_norm_")
    )
    return (
        "unscale, check, clip on one rank: engine; scaler",
        f"{engine}; {scaler}",
        "1, torch",
        "peers",
    )


def _trainer(result: dict[str, Any]) -> Row:
    ratio = Spread(*result["tokens_per_second_of_plain_ddp"]).median
    return (
        "tokens/s of the trainer, without console",
        f"{ratio:.2f}",
        "1, a plain DDP loop",
        "peers",
    )


def _stall(result: dict[str, Any]) -> Row:
    turns, blocking = result["turns"]["asynchronous"], result["turns"]["blocking"]
    blocked = [turn["stall"] for turn in blocking]
    stall = ratios([turn["stall"] for turn in turns], blocked).median
    return (
        "checkpoint: stall; with slower steps while writing",
        f"{stall:.3f}; {relative(runs.time_lost(turns), blocked)}",
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
        "`distmp explain`: memory, sent bytes",
        f"{min(shares):.3f} to {max(shares):.3f}",
        "1, real steps",
        "explain",
    )


def _bits(result: dict[str, Any]) -> Row:
    ranks = dict.fromkeys(run["layout"].partition(" ")[0] for run in result["runs"])
    return (
        f"different weights after {result['steps']} `reproducible` steps on "
        f"{', '.join(ranks)} ranks",
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
