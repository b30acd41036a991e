"""Divide the time of steps into parts that add up to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distmp.telemetry.profiling.trace import Trace
from distmp.utils.intervals import Interval, difference, intersection, length, union


class Breakdown(NamedTuple):
    """The time of a rank by part, in seconds. The parts add up to the total.

    Attributes:
        computation: Time of computation while no collective was running.
        hidden: Time of collectives that overlapped with computation.
        exposed: Time of collectives without computation.
        optimizer: Time of the gradient norm and the update, without collectives.
        data: Time in which the rank waited for data.
        idle: The rest: on CUDA the device was idle, on a CPU no operator ran.
    """

    computation: float
    hidden: float
    exposed: float
    optimizer: float
    data: float
    idle: float

    @property
    def total(self) -> float:
        """Total time in seconds."""
        return sum(self)

    @property
    def own(self) -> float:
        """Own time of the rank in seconds, without waiting for collectives."""
        return self.total - self.exposed


class TimeParts(NamedTuple):
    """The parts of `Breakdown` as intervals."""

    computation: list[Interval]
    hidden: list[Interval]
    exposed: list[Interval]
    optimizer: list[Interval]
    data: list[Interval]
    idle: list[Interval]

    def breakdown(self, steps: int) -> Breakdown:
        """Return the seconds per step, for a window of `steps` steps."""
        return Breakdown(*(length(part) / steps / 1e6 for part in self))


def divide(
    window: Sequence[Interval],
    *,
    data: Sequence[Interval],
    communication: Sequence[Interval],
    optimizer: Sequence[Interval],
    computation: Sequence[Interval],
) -> TimeParts:
    """Assign each moment of the window to one part.

    In order of precedence: waiting for data, communication, optimizer, other computation. All
    arguments are sorted intervals that do not overlap.
    """
    busy = union([*optimizer, *computation])
    left = list(window)
    assigned = []
    for part in (data, intersection(communication, busy), communication, optimizer, computation):
        assigned.append(intersection(left, part))
        left = difference(left, part)
    waiting, hidden, exposed, stepping, computing = assigned
    return TimeParts(computing, hidden, exposed, stepping, waiting, left)


def of_trace(trace: Trace) -> TimeParts:
    """Divide the time of the steps in a trace."""
    return divide(
        trace.window,
        data=trace.data,
        communication=trace.communication,
        optimizer=trace.optimizer,
        computation=trace.computation,
    )


def most_idle_phase(trace: Trace, parts: TimeParts) -> str:
    """Return the phase of the main thread with most of the idle time, or an empty string."""
    names = dict.fromkeys(phase.name for phase in trace.phases)
    idle = {
        name: length(intersection(parts.idle, [p.span for p in trace.phases if p.name == name]))
        for name in names
    }
    longest = max(idle, key=lambda name: idle[name], default="")
    return longest if longest and idle[longest] > 0 else ""
