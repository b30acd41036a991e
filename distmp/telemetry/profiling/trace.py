"""The trace of one rank: torch's events, sorted by their role in a step."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from distmp.distributed.progress import COMPARISON, DATA, DECISION, SAVING, UPDATE, VALIDATION
from distmp.utils.intervals import Interval, difference, intersection, union

# Phases between steps that are not part of any step.
PAUSES = (VALIDATION, COMPARISON, SAVING)
# The norm of the gradients and the update.
OPTIMIZER = (DECISION, UPDATE)

_ON_HOST = ("cpu_op", "user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Operators have a namespace, Python functions of autograd have none. Autograd nodes and user
# annotations contain hooks that wait for collectives: only operators inside of them compute.
_NO_COMPUTATION = ("autograd::", "torch::autograd::", "c10d::", "profiler::")
# Process id and thread id.
Thread = tuple[Any, Any]

# Compiled code runs without operators.
_COMPILED = "## Call CompiledFxGraph"


class Event(NamedTuple):
    """An event with a duration.

    Attributes:
        name: Name of the event in torch's trace.
        category: Category of the event in torch's trace.
        start: Start in microseconds, on the clock of the trace.
        stop: End in microseconds, on the clock of the trace.
        details: Further arguments of the event in torch's trace.
    """

    name: str
    category: str
    start: float
    stop: float
    details: Mapping[str, Any]

    @property
    def span(self) -> Interval:
        """Start and stop."""
        return self.start, self.stop


class Allocation(NamedTuple):
    """An allocation or free of memory.

    Attributes:
        time: Time in microseconds, on the clock of the trace.
        thread: The thread that allocated or freed.
        address: Address of the block.
        size: Size in bytes, negative for a free.
        total: Bytes in use afterwards, as counted by torch.
        on_cuda: Whether it is memory of a CUDA device.
    """

    time: float
    thread: Thread
    address: int
    size: int
    total: int
    on_cuda: bool


@dataclass(frozen=True)
class Trace:
    """The events of one rank in the recorded steps.

    Attributes:
        on_cuda: Whether the rank computed on a CUDA device.
        steps: The ranges of the steps.
        phases: The phases of the main thread, in order.
        main: The main thread.
        threads: Operators and annotated ranges of each thread, nested.
        device: Kernels and copies of the device, including collectives.
        transfers: Collectives of gloo.
        launches: Launch time in microseconds by correlation id.
        allocations: Allocations and frees, in order.
    """

    on_cuda: bool
    steps: list[Event]
    phases: list[Event]
    main: Thread
    threads: dict[Thread, list[Event]]
    device: list[Event]
    transfers: list[Event]
    launches: dict[int, float]
    allocations: list[Allocation]

    @classmethod
    def read(
        cls, events: Sequence[Mapping[str, Any]], places: Collection[str], *, on_cuda: bool
    ) -> Trace:
        """Read the events of a trace in Chrome's format.

        Args:
            events: The events of torch's profiler, in any order.
            places: Names of the ranges that are phases; steps are named "step 1" and so on.
            on_cuda: Whether the rank computed on a CUDA device.
        """
        complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
        complete.sort(key=lambda event: (event["ts"], -event["dur"]))
        steps = [event for event in complete if _is_step(event)]
        main = _thread(steps[0]) if steps else ("", "")
        threads: dict[Thread, list[Event]] = defaultdict(list)
        for event in complete:
            # A gloo collective starts in one thread and ends in another.
            if event.get("cat") in _ON_HOST and not event["name"].startswith("gloo:"):
                threads[_thread(event)].append(_event(event))
        return cls(
            on_cuda=on_cuda,
            steps=[_event(event) for event in steps],
            phases=[event for event in threads[main] if event.name in places],
            main=main,
            threads=dict(threads),
            device=[_event(event) for event in complete if event.get("cat") in _ON_DEVICE],
            transfers=[_event(e) for e in complete if e["name"].startswith("gloo:")],
            launches={
                event["args"]["correlation"]: event["ts"]
                for event in complete
                if event.get("cat") in ("cuda_runtime", "cuda_driver")
                and "correlation" in event.get("args", {})
            },
            allocations=sorted(_allocations(events), key=lambda one: one.time),
        )

    @cached_property
    def window(self) -> list[Interval]:
        """Times of the steps, without pauses between them."""
        times = [step.span for step in self.steps]
        if times and self.device:
            # The device finishes after the host.
            times.append((times[-1][1], max(event.stop for event in self.device)))
        return difference(union(times), self._in_phases(PAUSES))

    @property
    def data(self) -> list[Interval]:
        """Times in which the rank waited for data."""
        waiting = self._in_phases((DATA,))
        return difference(waiting, union(event.span for event in self.device))

    @property
    def communication(self) -> list[Interval]:
        """Times in which a collective was running."""
        kernels = (event for event in self.device if _communicates(event))
        return union(event.span for event in (*self.transfers, *kernels))

    @property
    def optimizer(self) -> list[Interval]:
        """Times of the gradient norm and of the update."""
        if not self.on_cuda:
            return intersection(self._computing(), self._in_phases(OPTIMIZER))
        return union(
            event.span
            for event in self._kernels()
            if self.place_at(self._launched(event)) in OPTIMIZER
        )

    @property
    def computation(self) -> list[Interval]:
        """Times in which the device computed, or in which an operator ran on a CPU."""
        if not self.on_cuda:
            return self._computing()
        return union(event.span for event in self._kernels())

    def place_at(self, time: float) -> str:
        """Return the phase of the main thread at a time, or an empty string."""
        phase = _at(self.phases, self._phase_starts, time)
        return "" if phase is None else phase.name

    def operator_of(self, allocation: Allocation) -> Event | None:
        """Return the outermost operator in which memory was allocated."""
        operators = self._operators.get(allocation.thread, [])
        return _at(operators, self._operator_starts.get(allocation.thread, []), allocation.time)

    def own_times(self) -> Iterator[tuple[str, float]]:
        """Yield the name and own time in microseconds of each operator in the window.

        The own time excludes nested operators. On CUDA it is the time of the launched kernels.
        """
        if not self.on_cuda:
            for event, time in _own_times(self.threads.get(self.main, [])):
                if _computes(event) and self._in_window(event):
                    yield event.name, time
            return
        names = {
            event.details.get("External id"): event.name
            for events in self.threads.values()
            for event in events
            if _computes(event)
        }
        for kernel in filter(self._in_window, self._kernels()):
            operator = names.get(kernel.details.get("External id"), kernel.name)
            yield operator, kernel.stop - kernel.start

    @cached_property
    def _phase_starts(self) -> list[float]:
        return [event.start for event in self.phases]

    @cached_property
    def _operators(self) -> dict[Thread, list[Event]]:
        """The outermost operators of each thread."""
        return {thread: _outermost(events) for thread, events in self.threads.items()}

    @cached_property
    def _operator_starts(self) -> dict[Thread, list[float]]:
        return {thread: [e.start for e in events] for thread, events in self._operators.items()}

    def _in_phases(self, names: Collection[str]) -> list[Interval]:
        return union(event.span for event in self.phases if event.name in names)

    def _computing(self) -> list[Interval]:
        return union(event.span for event in self._operators.get(self.main, []))

    def _kernels(self) -> Iterator[Event]:
        return (event for event in self.device if not _communicates(event))

    def _in_window(self, event: Event) -> bool:
        index = bisect_right(self.window, (event.start, math.inf)) - 1
        return index >= 0 and event.start < self.window[index][1]

    def _launched(self, kernel: Event) -> float:
        return self.launches.get(kernel.details.get("correlation", -1), kernel.start)


def _event(event: Mapping[str, Any]) -> Event:
    start = event["ts"]
    stop = start + event["dur"]
    return Event(event["name"], event.get("cat", ""), start, stop, event.get("args", {}))


def _thread(event: Mapping[str, Any]) -> Thread:
    return event["pid"], event["tid"]


def _is_step(event: Mapping[str, Any]) -> bool:
    is_annotation = event.get("cat") == "user_annotation"
    return is_annotation and re.fullmatch(r"step [0-9]+", event["name"]) is not None


def _computes(event: Event) -> bool:
    if event.name.startswith(_COMPILED):
        return True
    operator = event.category == "cpu_op" and "::" in event.name
    return operator and not event.name.startswith(_NO_COMPUTATION)


def _communicates(event: Event) -> bool:
    return event.name.lower().startswith("nccl")


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Return the operators that are not nested in others; the events are sorted by start."""
    result: list[Event] = []
    for event in events:
        if _computes(event) and not (result and event.start < result[-1].stop):
            result.append(event)
    return result


def _at(events: Sequence[Event], starts: Sequence[float], time: float) -> Event | None:
    index = bisect_right(starts, time) - 1
    return events[index] if index >= 0 and time < events[index].stop else None


def _own_times(nested: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event with its time, without the time of nested events."""
    own = [event.stop - event.start for event in nested]
    open_: list[int] = []
    for index, event in enumerate(nested):
        while open_ and nested[open_[-1]].stop <= event.start:
            open_.pop()
        if open_:
            own[open_[-1]] -= min(event.stop, nested[open_[-1]].stop) - event.start
        open_.append(index)
    yield from zip(nested, (max(0.0, time) for time in own), strict=True)


def _allocations(events: Iterable[Mapping[str, Any]]) -> Iterator[Allocation]:
    for event in events:
        if event.get("name") == "[memory]":
            details = event["args"]
            yield Allocation(
                event["ts"],
                _thread(event),
                details["Addr"],
                details["Bytes"],
                details["Total Allocated"],
                details["Device Type"] == 1,
            )
