"""Where the time of some steps went, over all ranks: for people, and as JSON."""

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
"""What the parts of `Breakdown` are called, in the order of the table."""

SUMMARY = "summary.json"
"""The file in the folder of profiles."""

# Operators that are kept of a rank, and how many of them are printed.
MOST_OPERATORS = 20
PRINTED_OPERATORS = 5
# Kernels are called by all of their template's arguments.
LONGEST_NAME = 80
# What is less than these shares of a step is not worth a word.
NOTICEABLE = 0.01
WORTH_A_LINE = 0.05


class Operator(NamedTuple):
    """What one kind of operator took in a step, in the mean over the steps.

    Attributes:
        name: As torch calls it; a kernel's where no operator has launched it.
        seconds: Its own work.
        calls: How often.
    """

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class RankSummary:
    """What was found out about one rank.

    Attributes:
        rank: Which one.
        host: On which machine.
        seconds: Where the time of a step went, in the mean over the steps.
        idle_phase: The phase with most of the idle time; empty without any.
        operators: Those that took longest.
        peak_bytes: Peak of memory in use, see `telemetry.profiling.memory.Memory`; None if unknown.
        peak_place: Where that was reached.
    """

    rank: int
    host: str
    seconds: Breakdown
    idle_phase: str
    operators: list[Operator]
    peak_bytes: int | None
    peak_place: str

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON has."""
        return {
            **vars(self),
            "seconds": self.seconds._asdict(),
            "operators": [operator._asdict() for operator in self.operators],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankSummary:
        """Read what `to_json` returned."""
        seconds = Breakdown(**values["seconds"])
        operators = [Operator(**operator) for operator in values["operators"]]
        return cls(**{**values, "seconds": seconds, "operators": operators})


@dataclass(frozen=True)
class Summary:
    """Where the time of some steps went.

    Attributes:
        first_step: First step that was recorded.
        last_step: The last one.
        ranks: Those of which something is known, in order; at least one.
    """

    first_step: int
    last_step: int
    ranks: list[RankSummary]

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            OSError: If that cannot be.
        """
        values = {**vars(self), "ranks": [rank.to_json() for rank in self.ranks]}
        with replacing(path) as file:
            file.write(json.dumps(values, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Summary:
        """Read what `write` has written.

        Raises:
            ConfigError: If the file is something else.
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
        """Which steps, on how many ranks, and what one took."""
        steps = f"step {self.first_step}"
        if self.last_step > self.first_step:
            steps = f"steps {self.first_step} to {self.last_step}"
        ranks = "one rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"
        return f"{steps} on {ranks}, {_ms(self._seconds)} ms a step"

    @property
    def _seconds(self) -> float:
        return statistics.fmean(rank.seconds.total for rank in self.ranks)

    def table(self) -> list[list[str]]:
        """Return the cells of a table: a head, and a row for each part of the time.

        Where ranks differ it has the least and the most, and who has them.
        """
        rows = [_row(part, self.ranks, self._seconds) for part in NAMES]
        head = ["", "ms a step", "share", "least", "most"]
        width = max(len(row) for row in rows)
        return [row + [""] * (width - len(row)) for row in [head[:width], *rows]]

    def notes(self) -> list[str]:
        """Return what else there is to say, a sentence each."""
        return [*self._slow_rank(), *self._idle(), *self._operators(), *self._memory()]

    def text(self) -> str:
        """Return table and notes for a terminal."""
        table = self.table()
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in table
        ]
        return "\n".join(f"  {line}" for line in [*lines, *self.notes()])

    def _slow_rank(self) -> Iterable[str]:
        """Name the rank that the others wait for."""
        if len(self.ranks) == 1:
            return
        slow = max(self.ranks, key=lambda rank: rank.seconds.own)
        others = [rank.seconds for rank in self.ranks if rank is not slow]
        longer = slow.seconds.own - statistics.median(other.own for other in others)
        if longer < WORTH_A_LINE * slow.seconds.total:
            return
        excess = {
            name: getattr(slow.seconds, part)
            - statistics.median(getattr(other, part) for other in others)
            for part, name in NAMES.items()
            if part != "exposed"
        }
        yield (
            f"rank {slow.rank} on {slow.host} holds up the others: {_ms(longer)} ms a step longer "
            f"by itself, most of it {max(excess, key=lambda name: excess[name])}"
        )

    def _idle(self) -> Iterable[str]:
        most = max(self.ranks, key=lambda rank: rank.seconds.idle)
        if most.idle_phase and most.seconds.idle > WORTH_A_LINE * most.seconds.total:
            yield f"idle mostly in: {most.idle_phase} (rank {most.rank})"

    def _operators(self) -> Iterable[str]:
        first = self.ranks[0]
        if first.operators:
            longest = (
                f"{operator.name} {_ms(operator.seconds)} ms"
                for operator in first.operators[:PRINTED_OPERATORS]
            )
            yield f"most own time (rank {first.rank}): {', '.join(longest)}"

    def _memory(self) -> Iterable[str]:
        known = [rank for rank in self.ranks if rank.peak_bytes is not None]
        if known:
            most = max(known, key=lambda rank: rank.peak_bytes or 0)
            yield (
                f"memory at its peak: {bytes_text(most.peak_bytes or 0)}, in {most.peak_place} "
                f"(rank {most.rank})"
            )


def longest(times: Iterable[tuple[str, float]], steps: int) -> list[Operator]:
    """Add up the microseconds of operators, and return those that took longest in a step."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, time in times:
        found[name[:LONGEST_NAME]].append(time)
    operators = [
        Operator(name, sum(each) / steps / 1e6, len(each) / steps) for name, each in found.items()
    ]
    return sorted(operators, key=lambda one: -one.seconds)[:MOST_OPERATORS]


def _row(part: str, ranks: Sequence[RankSummary], total: float) -> list[str]:
    seconds = {rank.rank: getattr(rank.seconds, part) for rank in ranks}
    mean = statistics.fmean(seconds.values())
    row = [NAMES[part], _ms(mean), f"{mean / total:.0%}" if total else ""]
    least, most = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    if seconds[most] - seconds[least] > NOTICEABLE * total:
        row += [f"{_ms(seconds[rank])} (rank {rank})" for rank in (least, most)]
    return row


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
