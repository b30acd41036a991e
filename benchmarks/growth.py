"""Measure how a step scales with the number of ranks: `python -m benchmarks.growth`.

Memory and sent bytes of a rank, predicted by `distmp explain` for 2 to 4,096 ranks and measured in
real steps on 2 and 4 CPU ranks, for a transformer of 22 M parameters. Every rank has the same
number of samples, so that the batch grows with the ranks. It takes four minutes on two cores.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
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
from distmp.precision import PrecisionPolicy, policy, resolve
from distmp.training.components import (
    Progress,
    build_engine,
    build_model_and_data,
    training_batches,
)

CPU = torch.device("cpu")

REAL = sized((2, 4), (2,))
COMPUTED = sized((8, 64, 512, 4096), (8,))
# The ranks of a machine share its free memory, which determines where gradients are accumulated.
RANKS_PER_MACHINE = 8
STEPS = 3
MEASURED = "a step after the first"
SAMPLES_PER_RANK = 2
COMMON = (
    f"--model.size={sized('22m', '1m')}",
    "--data.sequence-length=64",
    "--batch.microbatch-size=1",
    "--precision.policy=bf16",
    "--schedule.warmup-steps=0",
)
METHODS = {
    "`ddp`": ("--strategy=ddp",),
    "`ddp`, `shard_optimizer`": ("--strategy=ddp", "--shard-optimizer=true"),
    "`fsdp`": ("--strategy=fsdp",),
}


def main() -> int:
    methods: dict[str, dict[str, Any]] = {name: {} for name in METHODS}
    for ranks in (*REAL, *COMPUTED):
        configs = {name: configuration(options, ranks) for name, options in METHODS.items()}
        real = measure(configs, ranks) if ranks in REAL else {}
        for name, config in configs.items():
            local = min(ranks, RANKS_PER_MACHINE)
            predicted = predict(config, policy("bf16"), ranks, CPU, local)
            found = {"memory": predicted.memory_bytes, "wire": predicted.communication_bytes}
            methods[name][str(ranks)] = found | real.get(name, {})
            print(ranks, name, methods[name][str(ranks)], flush=True)
    result = {"machine": machine(), "samples_per_rank": SAMPLES_PER_RANK, "ways": methods}
    print(runs.growth(result))
    print(f"saved to {save('growth-cpu', result)}")
    return 0


def configuration(options: tuple[str, ...], ranks: int) -> RunConfig:
    """Return the configuration of a method on `ranks` ranks."""
    return load([*COMMON, *options, f"--batch.global-batch-size={SAMPLES_PER_RANK * ranks}"])


def measure(configs: dict[str, RunConfig], ranks: int) -> dict[str, dict[str, float]]:
    """Return memory, sent bytes and seconds of a step on the first rank of real runs, by name."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(_rank, (configs, ranks, directory), nprocs=ranks)
        found: dict[str, dict[str, float]] = json.loads(Path(directory, "found").read_text())
        return found


def _rank(rank: int, configs: dict[str, RunConfig], ranks: int, directory: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    found = {name: _measured(stepper(config)) for name, config in configs.items()}
    if rank == 0:
        Path(directory, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def _measured(step: Callable[[], object]) -> dict[str, float]:
    gc.collect()
    memory = peak_allocated(step)
    sent = sent_bytes(step)
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {
        "measured_memory": memory,
        "measured_wire": sent,
        "seconds": statistics.median(seconds),
    }


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
    events = [*_flat(profiler.profiler.kineto_results.experimental_event_tree())]
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


def _flat(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


def sent_bytes(step: Callable[[], object]) -> int:
    """Return the bytes that this process writes during a step, which gloo sends (Linux only)."""
    before = _written()
    step()
    return _written() - before


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


if __name__ == "__main__":
    sys.exit(main())
