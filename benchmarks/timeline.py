"""Predicts when the operations of a recorded step run on a GPU, from stated rates.

Streams run their operations in order. The GPU runs one kernel at a time, and the network one
collective at a time. Among those that could start, a stream of higher priority is first, then the
operation that the host launched first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["kernel", "collective", "wait"]


@dataclass(frozen=True)
class Rates:
    """Rates of a machine with 8 H100 (SXM), and of the host that launches kernels.

    Attributes:
        memory: Bytes per second that a kernel reads and writes. NVIDIA's datasheet has 3.35e12; a
            copy on an H200 reaches 87% of its datasheet (`step-tail-cuda`).
        many_tensors: Share of `memory` that norms, products and optimizers over lists of tensors
            reach. Fused AdamW and norms reach 54% and 57% of a copy on an H200 (`step-tail-cuda`).
        flops: Floating-point operations per second of matmuls by bytes per element. A large product
            in bfloat16 reaches 776e12 on an H200 (`step-tail-cuda`), those of a step less.
        within: Bytes per second that a rank sends in a collective over NVLink. Its datasheet has
            450e9 per direction; nccl-tests reach about 370e9 with 8 GPUs.
        between: Bytes per second that a rank's network card sends, 400 Gbit/s less 10%.
        latency: Seconds until a collective within a machine moves data, and one between machines.
        kernel: Least duration of a kernel, in seconds.
        launch: Seconds of the host for each launch: about 20e-6 on the host of an H200
            (`step-tail-cuda`), 39e-6 with backward of small models; faster hosts take 10e-6.
    """

    memory: float = 2.9e12
    many_tensors: float = 0.55
    flops: tuple[tuple[int, float], ...] = ((2, 600e12), (4, 50e12), (8, 50e12))
    within: float = 370e9
    between: float = 45e9
    latency: tuple[float, float] = (20e-6, 60e-6)
    kernel: float = 2e-6
    launch: float = 10e-6


@dataclass(frozen=True)
class Operation:
    """An operation that the host launches on a stream, or that it waits for.

    Attributes:
        name: Its operator.
        kind: "kernel", "collective", or "wait" for a wait of the host.
        stream: Its stream; a wait of the host has none.
        after: Indices of the earlier operations that it waits for, on other streams too.
        nbytes: Bytes that a kernel reads and writes, or that a rank sends in a collective.
        between: Bytes of a collective that the network card of a rank sends.
        flops: Floating-point operations of a matmul.
        itemsize: Bytes per element of the factors of a matmul.
        many_tensors: Whether a kernel works on lists of tensors.
        priority: Priority of the stream; a smaller number is higher, as in CUDA.
    """

    name: str
    kind: Kind
    stream: object
    after: tuple[int, ...] = ()
    nbytes: float = 0
    between: float = 0
    flops: float = 0
    itemsize: int = 2
    many_tensors: bool = False
    priority: int = 0

    def seconds(self, rates: Rates) -> float:
        """Return how long it runs."""
        if self.kind == "wait":
            return 0.0
        if self.kind == "collective":
            latency = rates.latency[self.between > 0]
            return latency + max(self.nbytes / rates.within, self.between / rates.between)
        memory = rates.memory * (rates.many_tensors if self.many_tensors else 1)
        computing = self.flops / dict(rates.flops)[self.itemsize]
        return max(rates.kernel, self.nbytes / memory, computing)


class Timeline(NamedTuple):
    """Predicted times in seconds.

    Attributes:
        begins: When each operation begins.
        ends: When each operation ends.
        computing: Time in which the GPU runs a kernel.
        exposed: Time in which only the network is busy: exposed communication.
        idle: Time in which neither is, because the host has launched nothing.
    """

    begins: list[float]
    ends: list[float]
    computing: float
    exposed: float
    idle: float

    @property
    def seconds(self) -> float:
        """Duration until the last operation has ended."""
        return self.computing + self.exposed + self.idle


def simulate(operations: Sequence[Operation], rates: Rates, begin: int = 0) -> Timeline:
    """Predict when operations run.

    Args:
        operations: In the order in which the host launches them.
        rates: The rates of the machine.
        begin: Index of an operation. The sums are over the time after all earlier ones have ended.
    """
    return _Simulation(operations, rates).run(begin)


class _Simulation:
    def __init__(self, operations: Sequence[Operation], rates: Rates) -> None:
        self._operations, self._rates = operations, rates
        self._begins = [0.0] * len(operations)
        self._ends = [0.0] * len(operations)
        # Later operations that wait for each one, and how many each one still waits for.
        self._later: dict[int, list[int]] = defaultdict(list)
        self._missing = [1] * len(operations)  # its launch by the host
        last: dict[object, int] = {}
        for index, operation in enumerate(operations):
            before = set(operation.after)
            if operation.kind != "wait" and operation.stream in last:
                before.add(last[operation.stream])
            last[operation.stream] = index
            self._missing[index] += len(before)
            for earlier in before:
                self._later[earlier].append(index)
        # Operations that could start, by what runs them: priority and index.
        self._ready: dict[Kind, list[tuple[int, int]]] = defaultdict(list)
        self._running: dict[Kind, int] = {}
        # Time, whether an operation ends (or is launched), and its index.
        self._events: list[tuple[float, bool, int]] = []

    def run(self, begin: int) -> Timeline:
        spent = {"computing": 0.0, "exposed": 0.0, "idle": 0.0}
        now, left = 0.0, begin
        self._launch_next(0, now)
        while self._events:
            time, ends, index = heapq.heappop(self._events)
            if not left:
                spent[self._state()] += time - now
            now = time
            if ends:
                left -= index < begin
                self._end(index, now)
            else:
                self._release(index, now)
                if self._operations[index].kind != "wait":
                    self._launch_next(index + 1, now)
            self._start(now)
        return Timeline(self._begins, self._ends, **spent)

    def _state(self) -> str:
        if "kernel" in self._running:
            return "computing"
        return "exposed" if "collective" in self._running else "idle"

    def _launch_next(self, index: int, now: float) -> None:
        if index < len(self._operations):
            waits = self._operations[index].kind == "wait"
            launched = now if waits else now + self._rates.launch
            heapq.heappush(self._events, (launched, False, index))

    def _release(self, index: int, now: float) -> None:
        """Count one of the conditions of an operation as met."""
        self._missing[index] -= 1
        if not self._missing[index]:
            operation = self._operations[index]
            if operation.kind == "wait":
                heapq.heappush(self._events, (now, True, index))
            else:
                heapq.heappush(self._ready[operation.kind], (operation.priority, index))

    def _start(self, now: float) -> None:
        for kind, ready in self._ready.items():
            if ready and kind not in self._running:
                index = heapq.heappop(ready)[1]
                self._running[kind] = index
                self._begins[index] = now
                ends = now + self._operations[index].seconds(self._rates)
                heapq.heappush(self._events, (ends, True, index))

    def _end(self, index: int, now: float) -> None:
        self._ends[index] = now
        kind = self._operations[index].kind
        if kind == "wait":
            self._begins[index] = now
            self._launch_next(index + 1, now)
        else:
            del self._running[kind]
        for later in self._later[index]:
            self._release(later, now)
