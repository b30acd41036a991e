"""What was allocated at the peak of some steps, from the trace of a rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from distmp.telemetry.profiling.trace import Allocation, Event, Trace
from distmp.telemetry.thinning import thinned

# Kinds of blocks that are listed, the largest first.
MOST_BLOCKS = 20


class Blocks(NamedTuple):
    """Blocks that were in use at the peak and came from the same place.

    Attributes:
        nbytes: Of all of them together.
        number: How many they are.
        operator: That allocated them; empty for what no operator did.
        shapes: Of its inputs.
        phase: In which the step was.
    """

    nbytes: int
    number: int
    operator: str
    shapes: str
    phase: str


@dataclass(frozen=True)
class Memory:
    """Memory that steps have used.

    Attributes:
        peak_bytes: The most that was in use at once. On CUDA all of it; on a CPU, where torch does
            not know what was allocated earlier, what these steps had allocated.
        phase: In which it was reached.
        step: The range of the step in which it was reached, as "step 20".
        largest: What was in use then, of what these steps had allocated.
        seconds: When memory changed, from the start of the first step, thinned out.
        in_use: Bytes in use then.
    """

    peak_bytes: int
    phase: str
    step: str
    largest: list[Blocks]
    seconds: list[float]
    in_use: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return what the file `memory-rankN.json` holds."""
        return {**asdict(self), "largest": [blocks._asdict() for blocks in self.largest]}


def of_trace(trace: Trace) -> Memory | None:
    """Follow the allocations of the steps; None if the trace has none."""
    begin = trace.steps[0].start if trace.steps else 0.0
    allocations = [
        one for one in trace.allocations if one.on_cuda == trace.on_cuda and one.time >= begin
    ]
    if not allocations:
        return None
    in_use = _in_use(allocations, absolute=trace.on_cuda)
    peak = int(np.argmax(in_use))
    time = allocations[peak].time
    seconds, kept = thinned(
        np.array([(one.time - begin) / 1e6 for one in allocations]), np.array(in_use, np.float64)
    )
    return Memory(
        peak_bytes=in_use[peak],
        phase=trace.place_at(time),
        step=next((step.name for step in trace.steps if step.start <= time < step.stop), ""),
        largest=_largest(trace, allocations[: peak + 1]),
        seconds=[round(float(second), 6) for second in seconds],
        in_use=[int(nbytes) for nbytes in kept],
    )


def _in_use(allocations: list[Allocation], *, absolute: bool) -> list[int]:
    """Return the bytes in use after each of them.

    On a CPU torch's own total misses what other threads give back, gloo's for one: an address that
    is given out once more has been given back before.
    """
    if absolute:
        return [one.total for one in allocations]
    sizes: dict[int, int] = {}
    total = 0
    found = []
    for one in allocations:
        total -= sizes.pop(one.address, 0)
        if one.size > 0:
            sizes[one.address] = one.size
            total += one.size
        found.append(total)
    return found


def _largest(trace: Trace, allocations: list[Allocation]) -> list[Blocks]:
    """Return what is in use after the last of the allocations, by where it came from."""
    blocks: dict[int, Allocation] = {}
    for one in allocations:
        blocks.pop(one.address, None)
        if one.size > 0:
            blocks[one.address] = one
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in blocks.values():
        operator = trace.operator_of(one)
        name, shapes = ("", "") if operator is None else (operator.name, _shapes(operator))
        groups[name, shapes, trace.place_at(one.time)].append(one.size)
    found = [Blocks(sum(sizes), len(sizes), *origin) for origin, sizes in groups.items()]
    return sorted(found, reverse=True)[:MOST_BLOCKS]


def _shapes(operator: Event) -> str:
    inputs = operator.details.get("Input Dims", ())
    return ", ".join(str(shape) for shape in inputs if shape)
