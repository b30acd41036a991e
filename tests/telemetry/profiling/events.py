"""Hand-written events of traces in the format of torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

from distmp.telemetry.profiling.trace import Trace

MAIN, ENGINE, GLOO, DEVICE = 1, 2, 3, 7
PHASES = (
    *("loading data", "beginning of the step", "forward of microbatch 1"),
    *("backward of microbatch 1", "reduction of the gradients", "decision", "update"),
    *("results of the step", "validation", "saving a checkpoint"),
)


def event(
    name: str, start: float, stop: float, category: str = "cpu_op", thread: int = MAIN, **args: Any
) -> dict[str, Any]:
    process = 0 if thread == DEVICE else 99
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": stop - start,
        "args": args,
    }


def phase(name: str, start: float, stop: float) -> dict[str, Any]:
    return event(name, start, stop, "user_annotation")


def gloo(start: float, stop: float) -> dict[str, Any]:
    return event("gloo:all_reduce", start, stop, "user_annotation", GLOO)


def launch(correlation: int, time: float, thread: int = MAIN) -> dict[str, Any]:
    return event(
        "cudaLaunchKernel", time, time + 1, "cuda_runtime", thread, correlation=correlation
    )


def kernel(name: str, start: float, stop: float, correlation: int = -1, **args: Any) -> Any:
    args = {"correlation": correlation, **args}
    return event(name, start, stop, "kernel", DEVICE, **args)


def memory(
    time: float, address: int, size: int, total: int = 0, device: int = 0, thread: int = MAIN
) -> Any:
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "pid": 99,
        "tid": thread,
        "ts": time,
        "args": {
            "Addr": address,
            "Bytes": size,
            "Total Allocated": total,
            "Device Type": device,
            "Device Id": 0,
        },
    }


def on_cpu(*events: dict[str, Any]) -> Trace:
    return Trace.read(events, PHASES, on_cuda=False)


def on_cuda(*events: dict[str, Any]) -> Trace:
    return Trace.read(events, PHASES, on_cuda=True)
