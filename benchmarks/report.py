"""Helpers to report and save results: medians with their spread, and the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.gpus import gpus
from benchmarks.peak import peak

RESULTS = Path(__file__).parent / "results"
# Environment variables that `python -m benchmarks` sets with --record and --smoke.
DIRECTORY, SMOKE = "BENCHMARKS_DIRECTORY", "BENCHMARKS_SMOKE"
# Where a run saves its results.
RUNS = Path(os.environ.get(DIRECTORY, RESULTS.parent.parent / "build" / "benchmarks"))
RECORDS = RUNS == RESULTS

Value = TypeVar("Value")


def sized(usual: Value, smoke: Value) -> Value:
    """Return the usual value of a setting, or with `--smoke` that of a run of a few seconds."""
    return smoke if SMOKE in os.environ else usual


class Spread(NamedTuple):
    """The median, minimum and maximum of several measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:,.3g} ({self.least:,.3g} to {self.most:,.3g})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratios of our times to those of another method, per round."""
    return Spread.of([one / other for one, other in zip(ours, theirs, strict=True)])


def relative(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the ratios of our times to those of another method: median, and interval of that."""
    median, low, high = median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Spread:
    """Return the median and an interval that covers that of the distribution.

    The limits are order statistics: the number of values below the true median has a binomial
    distribution (Conover, Practical Nonparametric Statistics, section 3.2). With fewer than six
    values they are minimum and maximum, which cover it less often than `confidence`.
    """
    count = len(values)
    # Probability that at most `below` values are smaller than the median.
    chances = accumulate(math.comb(count, below) / 2**count for below in range(count))
    allowed = sum(chance <= (1 - confidence) / 2 for chance in chances)
    skipped = max(0, allowed - 1)
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[skipped], ordered[count - 1 - skipped])


def alternating(names: Sequence[str], rounds: int, warm_up: int) -> Iterator[tuple[str, bool]]:
    """Yield the next name to measure and whether it counts; every turn starts with another name."""
    for turn in range(rounds + warm_up):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            yield name, turn >= warm_up


def in_turns(
    names: Sequence[str], rounds: int, measure: Callable[[str], float | None], warm_up: int = 1
) -> dict[str, list[float]]:
    """Return the measurements of each name in turns, without the first `warm_up` turns.

    A name for which `measure` returns None is skipped from then on.
    """
    results: dict[str, list[float]] = {name: [] for name in names}
    for name, counts in alternating(names, rounds, warm_up):
        if name in results:
            measured = measure(name)
            if measured is None:
                del results[name]
            elif counts:
                results[name].append(measured)
    return results


def machine(device: torch.device | str | None = None) -> dict[str, Any]:
    """Return the hardware and versions of a measurement.

    Args:
        device: The measured device. For a GPU the result contains its peak performance
            (`benchmarks.peak`), which takes a few seconds. None uses a GPU if there is one.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        **(_gpu(device) if device.type == "cuda" else {"gpu": None}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this checkout, "-dirty" if its code has changed; None outside of one."""
    described = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "-uno", "--", ":/distmp", ":/benchmarks/*.py")
    return f"{described}-dirty" if changed else described or None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=RESULTS, capture_output=True, text=True)
    return done.stdout.strip()


def _gpu(device: torch.device) -> dict[str, Any]:
    devices = gpus()
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "gpu_memory": torch.cuda.get_device_properties(device).total_memory,
        "driver": devices[0].driver if devices else None,
        "cuda": torch.version.cuda,
        "peak": peak(device),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the same keys as a Markdown table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *[[str(row[name]) for name in head] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(name: str, result: Mapping[str, object]) -> Path:
    """Save a result in `build/benchmarks`, or in `benchmarks/results` with `--record`."""
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
