"""Compare `distmp explain` with allocated memory: `python -m benchmarks.explain_memory`.

Measures the peak memory of torch's CPU allocator with torch's profiler, including memory of
kernels. It takes about two minutes on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.report import machine, save, sized
from benchmarks.tables import runs
from distmp.commands.explain.explanation import predict
from distmp.config import RunConfig, load
from distmp.distributed.world import World
from distmp.precision import PrecisionPolicy, resolve
from distmp.training.components import (
    Progress,
    build_engine,
    build_model_and_data,
    training_batches,
)

CPU = torch.device("cpu")
QUICKSTART = ("--config", "configs/quickstart.yaml")
SMALL_22M = (
    "--model.size=22m",
    "--data.sequence-length=64",
    "--batch.global-batch-size=4",
    "--batch.microbatch-size=2",
)
# Name: number of ranks, and the command line of the run.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "quickstart": (2, QUICKSTART),
    "quickstart, `shard_optimizer`": (2, (*QUICKSTART, "--shard-optimizer")),
    "quickstart, `fsdp`": (2, (*QUICKSTART, "--strategy=fsdp")),
    "22m, `fp32`": (1, (*SMALL_22M, "--precision.policy=fp32")),
    "22m, `bf16`": (1, (*SMALL_22M, "--precision.policy=bf16")),
}
STEPS = 3
MEASURED = "a step after the first"


def main() -> int:
    cases = {}
    for name in sized([*CASES], ["quickstart"]):
        ranks, argv = CASES[name]
        config = load(argv)
        policy, _ = resolve(config.precision.policy, CPU)
        predicted = predict(config, policy, ranks, CPU)
        cases[name] = {
            "ranks": ranks,
            "policy": policy.name,
            "predicted": predicted.memory_bytes,
            "measured": measure(config, ranks),
        }
        print(name, cases[name], flush=True)
    result = {"machine": machine(), "steps": STEPS, "cases": cases}
    print(runs.explain_memory(result))
    print(f"saved to {save('explain-memory-cpu', result)}")
    return 0


def measure(config: RunConfig, ranks: int) -> int:
    """Return the peak memory of the first rank of a real run, in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(_rank, (config, ranks, directory), nprocs=ranks)
        return int(open(f"{directory}/peak").read())


def _rank(rank: int, config: RunConfig, ranks: int, directory: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = f"file://{directory}/store"
        dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    peak = peak_allocated(stepper(config))
    if rank == 0:
        with open(f"{directory}/peak", "w") as file:
            file.write(str(peak))
    if ranks > 1:
        dist.destroy_process_group()


def stepper(config: RunConfig, **changes: Any) -> Callable[[], object]:
    """Return a function that runs a step; its first call also builds the engine.

    Args:
        config: The configuration of the run.
        **changes: Other fields of the engine's settings.
    """
    world = World.current(CPU)
    policy, _ = resolve(config.precision.policy, CPU)
    steps = _steps(config, world, policy, changes)
    return lambda: next(steps)


def _steps(
    config: RunConfig, world: World, policy: PrecisionPolicy, changes: dict[str, Any]
) -> Iterator[object]:
    parts = build_model_and_data(config, world)
    engine = build_engine(config, parts, world, policy=policy, **changes)
    with closing(training_batches(config, parts, world, Progress())) as batches:
        for each in batches:
            yield engine.step(each.microbatches)


def peak_allocated(step: Callable[[], object]) -> int:
    """Return the peak memory of torch's CPU allocator in a step after the first, in bytes.

    It is the minimum over several steps: memory that gloo's threads free is detected only when its
    address is used again.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        for _ in range(STEPS - 1):
            with record_function(MEASURED):
                step()
    assert profiler.profiler is not None
    events = [*_all(profiler.profiler.kineto_results.experimental_event_tree())]
    begins = sorted(event.start_time_ns for event in events if event.name == MEASURED)
    allocations = sorted(
        (event for event in events if event.tag == _EventType.Allocation),
        key=lambda event: event.start_time_ns,
    )
    # Count by address: the profiler's total misses memory that gloo's threads free.
    allocated: dict[int, int] = {}
    total = 0
    peaks = [0] * len(begins)
    for event in allocations:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        total -= allocated.pop(address, 0)
        if size > 0:
            allocated[address] = size
            total += size
        step_number = bisect(begins, event.start_time_ns) - 1
        if step_number >= 0:
            peaks[step_number] = max(peaks[step_number], total)
    return min(peaks)


def _all(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


if __name__ == "__main__":
    sys.exit(main())
