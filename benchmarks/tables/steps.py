"""Tables about training steps, and about the work after backward."""

from __future__ import annotations

from typing import Any

from benchmarks import races
from benchmarks.report import Spread, ratios, relative, table
from benchmarks.tables.machine import machine_line, threads

STOCK = "torch: unscale, clip, step"


def quickstart(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.quickstart` and a line on its machine."""
    speeds = {name: Spread(*values) for name, values in result["tokens_per_second"].items()}
    ratio = Spread(*result["tokens_per_second_of_plain_ddp"])
    rows: list[dict[str, object]] = [
        {"loop": "distmp", "tokens/s": speeds["distmp"], "relative to plain DDP": ratio},
        {"loop": "plain torch DDP", "tokens/s": speeds["plain"], "relative to plain DDP": 1},
    ]
    return (
        f"{table(rows)}\n\nMedian (min to max) of {len(result['seconds']['plain'])} alternating "
        f"rounds of {result['steps_per_turn']} steps, {result['machine']['cores']} cores of "
        + machine_line(result)
    )


def step_tail(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.step_tail` and a line on its machine."""
    taken = {name: Spread.of(values) for name, values in result["milliseconds"].items()}
    beyond = beyond_bare(result)
    # A copy reads and writes, so one read at its bandwidth is half of it.
    floor = taken.pop("copy").median / 2
    norm = taken.pop("norm alone").median
    rows: list[dict[str, object]] = []
    for name, spread in taken.items():
        added = Spread.of(beyond[name]).median
        row: dict[str, object] = {"method": name, "ms": spread}
        row["beyond the bare step, ms"] = f"{added:.3g}" if added else ""
        compared = relative(beyond[name], beyond[STOCK]) if name != STOCK else "1"
        row["relative to torch"] = compared if added else ""
        row["relative to the lower bound"] = f"{added / floor:.1f}" if added else ""
        rows.append(row)
    return (
        f"{table(rows)}\n\nMedian (min to max) of {len(result['milliseconds']['copy'])} "
        "alternating rounds; of ratios, per round, median (95% confidence interval); "
        f"{result['elements'] / 1e6:.1f} M FP32 gradient elements. The lower "
        f"bound, one read at copy bandwidth, is {floor:.3g} ms, the norm alone {norm:.3g} ms. "
        f"{threads(result)}{machine_line(result)}"
    )


def beyond_bare(result: dict[str, Any]) -> dict[str, list[float]]:
    """Return the time of each method of `benchmarks.step_tail` beyond the bare step, per round."""
    taken = result["milliseconds"]
    return {
        name: [one - bare for one, bare in zip(values, taken["bare fused AdamW"], strict=True)]
        for name, values in taken.items()
    }


def first_steps(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.first_steps` and a line on its machine."""
    loops = result["loops"]
    rows: list[dict[str, object]] = [
        {
            f"loop, {result['size']}": name,
            "ms a step": Spread.of([1000 * one for one in found["seconds"]]),
            "peak memory, MB": f"{found['memory'] / 1e6:,.0f}",
            "loss": f"{found['loss']:.4f}",
        }
        for name, found in loops.items()
    ]
    count = len(next(iter(loops.values()))["seconds"])
    return (
        f"{table(rows)}\n\nMedian (min to max) of {count} steps of {result['tokens']:,} tokens on "
        f"{result['ranks']} ranks; one loop after the other. {machine_line(result)}"
    )


def first_steps_line(name: str, result: dict[str, Any]) -> str:
    """Return a line about a loop of `benchmarks.first_steps`."""
    found = result["loops"][name]
    seconds = Spread.of(found["seconds"]).median
    speed = f"{1000 * seconds:,.1f} ms a step, {result['tokens'] / seconds:,.0f} tokens/s"
    work = f"{result['flops'] / seconds / 1e12:,.1f} TFLOP/s, {found['memory'] / 1e6:,.0f} MB"
    return f"{name}: {speed}, {work}, loss {found['loss']:.4f}"


def host_cost(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.host_cost` and a line on its machine."""
    rows: list[dict[str, object]] = [
        {
            "ranks": 2,
            "policy": policy,
            "ms per microbatch": Spread.of(taken["distmp"]),
            "relative to": f"DDP, {Spread.of(taken['DDP'])} ms",
            "ratio": ratios(taken["distmp"], taken["DDP"]),
        }
        for policy, taken in result["beside_ddp"].items()
    ]
    for policy, taken in result["pretended"].items():
        fewest = min(taken, key=int)
        rows += [
            {
                "ranks": f"{int(ranks):,}, simulated",
                "policy": policy,
                "ms per microbatch": Spread.of(found),
                "relative to": f"{fewest} ranks",
                "ratio": ratios(found, taken[fewest]),
            }
            for ranks, found in taken.items()
        ]
    return (
        f"{table(rows)}\n\nProcessor time of a rank, median (min to max) of "
        f"{len(result['beside_ddp']['fp32']['DDP'])} alternating rounds of a step of "
        f"{result['microbatches']} microbatches; ratios per round. {machine_line(result)}"
    )


def peers(result: dict[str, Any]) -> str:
    """Return the tables of `benchmarks.peers`, and a line on method and machine."""
    tables = [races.rendered(name, race) for name, race in result["races"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        "\n\n".join([*tables, *filter(None, [races.excluded(result["races"])])])
        + f"\n\nIn all races {result['ranks']} ranks with "
        f"{result['microbatches']} microbatches a step; tokens/s is the median "
        f"of {result['turns']} alternating rounds of one step; relative time is the median of the "
        f"ratios per round, with its 95% confidence interval. Losses of {result['steps']} steps. "
        f"{versions}; {machine_line(result)}"
    )


def predicted_step(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks.predicted_step` and a line on its rates."""
    rows: list[dict[str, object]] = []
    for ranks, methods in result["ranks"].items():
        reference = next(iter(methods.values()))
        for name, found in methods.items():
            rows.append(
                {
                    "ranks": ranks,
                    "method": name,
                    "ms a step": f"{1000 * found['seconds']:,.0f}",
                    "relative time": f"{found['seconds'] / reference['seconds']:.3f}",
                    "exposed communication, ms": f"{1000 * found['exposed']:.1f}",
                    "launches": f"{found['launches']:,}",
                    "memory traffic, GB": f"{found['memory'] / 1e9:,.0f}",
                    "sent, GB": f"{found['sent'] / 1e9:.1f}",
                }
            )
    rates = result["rates"]
    flops = dict(rates["flops"])[2] / 1e12
    return (
        f"{table(rows)}\n\nPredicted, not measured: {result['size']} transformer, "
        f"{result['tokens']:,} tokens of a rank in a step, recomputed blocks, on H100s with "
        f"{flops:,.0f} TFLOP/s, {rates['memory'] / 1e12:.1f} TB/s, "
        f"{rates['within'] / 1e9:.0f} GB/s within and {rates['between'] / 1e9:.0f} GB/s of each "
        f"GPU between machines of 8, and {1e6 * rates['launch']:.0f} us of the host for a launch. "
        f"torch {result['machine']['torch']}, {result['machine']['date']}."
    )
