"""The time of steps, divided into parts that add up to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distmp.telemetry.profiling.intervals import Interval, difference, intersection, length, union
from distmp.telemetry.profiling.trace import Trace


class Breakdown(NamedTuple):
    """What a rank did with its time, in seconds. The parts add up to the whole.

    Attributes:
        computation: Something was computed, and no collective was under way.
        hidden: A collective was under way, and something was computed at the same time.
        exposed: A collective was under way, and nothing was computed.
        optimizer: The norm of the gradients, the update, and no collective.
        data: Nothing was done before data were there.
        idle: Nothing of all that. On CUDA the device had nothing to do, on a CPU no operator ran.
    """

    computation: float
    hidden: float
    exposed: float
    optimizer: float
    data: float
    idle: float

    @property
    def total(self) -> float:
        """The whole time."""
        return sum(self)

    @property
    def own(self) -> float:
        """The time that this rank takes by itself: without waiting for collectives."""
        return self.total - self.exposed


class TimeParts(NamedTuple):
    """The same as `Breakdown`, as the times themselves."""

    computation: list[Interval]
    hidden: list[Interval]
    exposed: list[Interval]
    optimizer: list[Interval]
    data: list[Interval]
    idle: list[Interval]

    def breakdown(self, steps: int) -> Breakdown:
        """Return seconds per step, of so many steps."""
        return Breakdown(*(length(part) / steps / 1e6 for part in self))


def divide(
    window: Sequence[Interval],
    *,
    data: Sequence[Interval],
    communication: Sequence[Interval],
    optimizer: Sequence[Interval],
    computation: Sequence[Interval],
) -> TimeParts:
    """Give each moment of the window to one part.

    Waiting for data comes first, then communication, then the optimizer, then other computation.
    All arguments are intervals in order that do not overlap.
    """
    busy = union([*optimizer, *computation])
    left = list(window)
    found = []
    for part in (data, intersection(communication, busy), communication, optimizer, computation):
        found.append(intersection(left, part))
        left = difference(left, part)
    waiting, hidden, exposed, stepping, computing = found
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
    """Return in which phase of the main thread most of the idle time lies; empty without any."""
    names = dict.fromkeys(phase.name for phase in trace.phases)
    idle = {
        name: length(intersection(parts.idle, [p.span for p in trace.phases if p.name == name]))
        for name in names
    }
    longest = max(idle, key=lambda name: idle[name], default="")
    return longest if longest and idle[longest] > 0 else ""
