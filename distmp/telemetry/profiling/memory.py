"""Find the allocations at the memory peak of the recorded steps, from the trace of a rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from distmp.telemetry.profiling.trace import Allocation, Event, Trace
from distmp.telemetry.thinning import thinned

# Maximum number of listed groups of blocks, largest first.
MAX_GROUPS = 20


class Blocks(NamedTuple):
    """Memory blocks in use at the peak that have the same origin.

    Attributes:
        nbytes: Total size of the blocks in bytes.
        number: Number of blocks.
        operator: Name of the operator that allocated them, or an empty string.
        shapes: Shapes of the operator's inputs.
        phase: Phase of the step in which they were allocated.
    """

    nbytes: int
    number: int
    operator: str
    shapes: str
    phase: str


@dataclass(frozen=True)
class Memory:
    """Memory use of the recorded steps.

    Attributes:
        peak_bytes: Peak memory in bytes. On CUDA it includes all memory; on a CPU only allocations
            of these steps, because torch does not know earlier ones.
        phase: Phase of the step at the peak.
        step: Name of the step at the peak, such as "step 20".
        largest: Blocks in use at the peak that these steps allocated, largest first.
        seconds: Times of the changes in memory use since the start of the first step, thinned.
        in_use: Bytes in use at these times.
    """

    peak_bytes: int
    phase: str
    step: str
    largest: list[Blocks]
    seconds: list[float]
    in_use: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file `memory-rankN.json`."""
        return {**asdict(self), "largest": [blocks._asdict() for blocks in self.largest]}


def of_trace(trace: Trace) -> Memory | None:
    """Return the memory use of the steps, or None if the trace has no allocations."""
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
    """Return the bytes in use after each allocation.

    On a CPU, torch's total misses memory that other threads free, for example gloo's: an address
    that is allocated again must have been freed before.
    """
    if absolute:
        return [one.total for one in allocations]
    sizes: dict[int, int] = {}
    total = 0
    in_use = []
    for one in allocations:
        total -= sizes.pop(one.address, 0)
        if one.size > 0:
            sizes[one.address] = one.size
            total += one.size
        in_use.append(total)
    return in_use


def _largest(trace: Trace, allocations: list[Allocation]) -> list[Blocks]:
    """Return the blocks in use after the last allocation, grouped by origin."""
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
    blocks_by_origin = [Blocks(sum(sizes), len(sizes), *origin) for origin, sizes in groups.items()]
    return sorted(blocks_by_origin, reverse=True)[:MAX_GROUPS]


def _shapes(operator: Event) -> str:
    inputs = operator.details.get("Input Dims", ())
    return ", ".join(str(shape) for shape in inputs if shape)
