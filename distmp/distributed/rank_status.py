"""What ranks publish about themselves: status, process, and the decision that they wait in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distmp.utils.processes import ProcessIdentity


@dataclass
class RankStatus:
    """What a rank is doing, as it reports itself.

    Its main thread is the one that calls the scaler or the engine.

    Attributes:
        decisions: Number of decisions that the rank has begun, by name of the process group.
        last_call: Latest call of a scaler, as text; "" before the first one.
        line: Line of the user's code that the main thread executes; "" if unknown.
        engine_calls: Number of calls of engines that the rank has begun.
        engine_call: Latest call of an engine, as text; "" before the first one.
        waits_in: The collective or roll call that the main thread waits in, or "".
        synchronizes: The call in which the host waits for the device, or "".
        collectives: Number of collectives of a sharded model that the rank has begun.
        comparison: Name of the latest comparison of its next collective with that of other ranks.
        compares: The collective that it compares there, as text; "" after the comparison.
        busy_seconds: Processor time of the main thread.
        child_seconds: Processor time of the child processes, which may compile.
        doing: The current phase as text.
        idle: Seconds since the main thread last made progress.
        started: Number of collectives that the rank has started, by process group, see
            `flight_recorder.started`.
        last_started: Name of the collective that distmp started last; "" before the first one.
        stack: The stack of the main thread, with the innermost call last.
        host: Name of the machine.
    """

    decisions: dict[str, int] = field(default_factory=dict)
    last_call: str = ""
    line: str = ""
    engine_calls: int = 0
    engine_call: str = ""
    waits_in: str = ""
    synchronizes: str = ""
    collectives: int = 0
    comparison: str = ""
    compares: str = ""
    busy_seconds: float = 0.0
    child_seconds: float = 0.0
    doing: str = ""
    idle: float = 0.0
    started: dict[str, int] = field(default_factory=dict)
    last_started: str = ""
    stack: str = ""
    host: str = ""

    def __str__(self) -> str:
        last = f"; the last call of its scaler was {self.last_call}" if self.last_call else ""
        if self.engine_call:
            last += f"; the last call of its engine was {self.engine_call}"
        line = f" at {self.line}" if self.line else ""
        return f"is{line}{last}"


class RankProcess(NamedTuple):
    """The process of a rank.

    Attributes:
        host: Name of its machine.
        identity: The process.
        address: The address at which other machines reach its machine; "" if unknown.
    """

    host: str
    identity: ProcessIdentity
    address: str = ""


# The status of ranks; None for a rank that does not answer.
Statuses = Mapping[int, RankStatus | None]


@dataclass
class PendingDecision:
    """A decision that this rank has begun and that may still wait for other ranks.

    Attributes:
        group: Name of the process group.
        number: Index of the decision in the group, counted from 1.
        ranks: The global ranks of the group.
        is_over: Returns whether the device has completed the decision. A decision on the CPU is
            over when the reduction returns.
        since: When the decision began, in seconds of the monotonic clock.
        has_warned: Whether the missing ranks were logged.
    """

    group: str
    number: int
    ranks: Sequence[int]
    is_over: Callable[[], bool]
    since: float
    has_warned: bool = False
