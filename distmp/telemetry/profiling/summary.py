"""Summarize where the time of the recorded steps went on all ranks, as text and as JSON."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distmp.errors import ConfigError
from distmp.telemetry.profiling.breakdown import Breakdown
from distmp.utils.files import replacing
from distmp.utils.units import bytes_text

NAMES = {
    "computation": "computation",
    "hidden": "communication, hidden",
    "exposed": "communication, exposed",
    "optimizer": "optimizer",
    "data": "data",
    "idle": "idle",
}
"""Names of the parts of `Breakdown`, in the order of the table."""

SUMMARY = "summary.json"
"""Name of the summary file in the folder of profiles."""

# Number of operators that are stored per rank, and number of printed ones.
MAX_OPERATORS = 20
PRINTED_OPERATORS = 5
# Names of kernels contain all of their template's arguments.
MAX_NAME_LENGTH = 80
# Differences and times below these shares of a step are not printed.
MIN_DIFFERENCE = 0.01
MIN_SHARE = 0.05


class Operator(NamedTuple):
    """The time of an operator per step, averaged over the recorded steps.

    Attributes:
        name: Name of the operator, or of the kernel if no operator launched it.
        seconds: Its own time per step.
        calls: Number of calls per step.
    """

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class RankSummary:
    """The summary of one rank.

    Attributes:
        rank: Number of the rank.
        host: Name of its machine.
        seconds: Time per step by part, averaged over the recorded steps.
        idle_phase: The phase with most of the idle time, or an empty string.
        operators: The operators with the largest own time.
        peak_bytes: Peak memory, see `telemetry.profiling.memory.Memory`; None if unknown.
        peak_place: Phase and step of the memory peak.
    """

    rank: int
    host: str
    seconds: Breakdown
    idle_phase: str
    operators: list[Operator]
    peak_bytes: int | None
    peak_place: str

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return {
            **vars(self),
            "seconds": self.seconds._asdict(),
            "operators": [operator._asdict() for operator in self.operators],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankSummary:
        """Create a summary from the values of `to_json`."""
        seconds = Breakdown(**values["seconds"])
        operators = [Operator(**operator) for operator in values["operators"]]
        return cls(**{**values, "seconds": seconds, "operators": operators})


@dataclass(frozen=True)
class Summary:
    """The summary of all ranks.

    Attributes:
        first_step: First recorded step.
        last_step: Last recorded step.
        ranks: The ranks with a recording, in order; at least one.
    """

    first_step: int
    last_step: int
    ranks: list[RankSummary]

    def write(self, path: Path) -> None:
        """Write the summary as JSON.

        Raises:
            OSError: If the file cannot be written.
        """
        values = {**vars(self), "ranks": [rank.to_json() for rank in self.ranks]}
        with replacing(path) as file:
            file.write(json.dumps(values, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Summary:
        """Read a file of `write`.

        Raises:
            ConfigError: If the file is not a summary.
        """
        try:
            values = json.loads(path.read_bytes())
            ranks = [RankSummary.from_json(rank) for rank in values.pop("ranks")]
            return cls(**values, ranks=ranks)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                "run_dir", str(path), f"is not the summary of a profile ({error}); remove it"
            ) from None

    @property
    def title(self) -> str:
        """The recorded steps, the number of ranks and the time per step, as text."""
        steps = f"step {self.first_step}"
        if self.last_step > self.first_step:
            steps = f"steps {self.first_step} to {self.last_step}"
        ranks = "one rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"
        return f"{steps} on {ranks}, {_ms(self._seconds)} ms a step"

    @property
    def _seconds(self) -> float:
        return statistics.fmean(rank.seconds.total for rank in self.ranks)

    def table(self) -> list[list[str]]:
        """Return the cells of a table: a header, and a row for each part of the time.

        If ranks differ, the row contains the smallest and largest value with their ranks.
        """
        rows = [_row(part, self.ranks, self._seconds) for part in NAMES]
        head = ["", "ms a step", "share", "min", "max"]
        width = max(len(row) for row in rows)
        return [row + [""] * (width - len(row)) for row in [head[:width], *rows]]

    def notes(self) -> list[str]:
        """Return notes on slow ranks, idle time, operators and memory, one line each."""
        return [*self._slow_rank(), *self._idle(), *self._operators(), *self._memory()]

    def text(self) -> str:
        """Return the table and the notes as text."""
        table = self.table()
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in table
        ]
        return "\n".join(f"  {line}" for line in [*lines, *self.notes()])

    def _slow_rank(self) -> Iterable[str]:
        """Yield a note on the rank for which the others wait, if any."""
        if len(self.ranks) == 1:
            return
        slow = max(self.ranks, key=lambda rank: rank.seconds.own)
        others = [rank.seconds for rank in self.ranks if rank is not slow]
        longer = slow.seconds.own - statistics.median(other.own for other in others)
        if longer < MIN_SHARE * slow.seconds.total:
            return
        excess = {
            name: getattr(slow.seconds, part)
            - statistics.median(getattr(other, part) for other in others)
            for part, name in NAMES.items()
            if part != "exposed"
        }
        part = max(excess, key=lambda name: excess[name])
        yield (
            f"rank {slow.rank} on {slow.host} slows down the others: its time without waiting is "
            f"{_ms(longer)} ms a step longer, most of it {part}"
        )

    def _idle(self) -> Iterable[str]:
        most = max(self.ranks, key=lambda rank: rank.seconds.idle)
        if most.idle_phase and most.seconds.idle > MIN_SHARE * most.seconds.total:
            yield f"mostly idle in: {most.idle_phase} (rank {most.rank})"

    def _operators(self) -> Iterable[str]:
        first = self.ranks[0]
        if first.operators:
            longest = (
                f"{operator.name} {_ms(operator.seconds)} ms"
                for operator in first.operators[:PRINTED_OPERATORS]
            )
            yield f"largest self time (rank {first.rank}): {', '.join(longest)}"

    def _memory(self) -> Iterable[str]:
        known = [rank for rank in self.ranks if rank.peak_bytes is not None]
        if known:
            most = max(known, key=lambda rank: rank.peak_bytes or 0)
            yield (
                f"peak memory: {bytes_text(most.peak_bytes or 0)}, in {most.peak_place} "
                f"(rank {most.rank})"
            )


def longest(times: Iterable[tuple[str, float]], steps: int) -> list[Operator]:
    """Sum the microseconds of operators by name, and return those with the largest own time."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, time in times:
        by_name[name[:MAX_NAME_LENGTH]].append(time)
    operators = [
        Operator(name, sum(each) / steps / 1e6, len(each) / steps) for name, each in by_name.items()
    ]
    return sorted(operators, key=lambda one: -one.seconds)[:MAX_OPERATORS]


def _row(part: str, ranks: Sequence[RankSummary], total: float) -> list[str]:
    seconds = {rank.rank: getattr(rank.seconds, part) for rank in ranks}
    mean = statistics.fmean(seconds.values())
    row = [NAMES[part], _ms(mean), f"{mean / total:.0%}" if total else ""]
    least, most = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    if seconds[most] - seconds[least] > MIN_DIFFERENCE * total:
        row += [f"{_ms(seconds[rank])} (rank {rank})" for rank in (least, most)]
    return row


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
