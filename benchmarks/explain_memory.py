"""What `distmp explain` predicts against what is allocated: `python -m benchmarks.explain_memory`.

Measured is the peak of what torch's CPU allocator has given out, kernels' own memory included, as
torch's profiler follows it; processes do not share it. About two minutes on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.spawn as processes
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks import figures
from benchmarks.report import machine, save
from distmp.config import RunConfig, load
from distmp.explain.explanation import predict
from distmp.parallel.world import World
from distmp.precision import resolve
from distmp.trainer import Progress, build_engine, prepare, training_batches

CPU = torch.device("cpu")
QUICKSTART = ("--config", "configs/quickstart.yaml")
SMALL_22M = (
    "--model.size=22m",
    "--data.sequence-length=64",
    "--batch.global-batch-size=4",
    "--batch.microbatch-size=2",
)
# Name: ranks, and the command line of the run.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "quickstart": (2, QUICKSTART),
    "quickstart, `fp32`": (2, (*QUICKSTART, "--precision.policy=fp32")),
    "quickstart, `shard_optimizer`": (2, (*QUICKSTART, "--shard-optimizer")),
    "quickstart, `fsdp`": (2, (*QUICKSTART, "--strategy=fsdp")),
    "22m, `fp32`": (1, (*SMALL_22M, "--precision.policy=fp32")),
    "22m, `bf16`": (1, (*SMALL_22M, "--precision.policy=bf16")),
    "22m, `bf16-autocast`": (1, (*SMALL_22M, "--precision.policy=bf16-autocast")),
}
STEPS = 3


def main() -> int:
    cases = {}
    for name, (ranks, argv) in CASES.items():
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
    print(figures.explain_memory(result))
    print(f"kept in {save('explain-memory-cpu', result)}")
    return 0


def measure(config: RunConfig, ranks: int) -> int:
    """Return the peak of the first rank of a real run, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (config, ranks, folder), nprocs=ranks)
        return int(open(f"{folder}/peak").read())


def _rank(rank: int, config: RunConfig, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    peak = peak_allocated(lambda: train(config, STEPS))
    if rank == 0:
        with open(f"{folder}/peak", "w") as file:
            file.write(str(peak))
    if ranks > 1:
        dist.destroy_process_group()


def train(config: RunConfig, steps: int) -> Any:
    """Build the engine of a run and take its first steps; return the engine."""
    world = World.current(CPU)
    parts = prepare(config, world)
    policy, _ = resolve(config.precision.policy, CPU)
    attribution = config.precision.attribution
    engine = build_engine(config, parts, world, policy=policy, attribution=attribution)
    with closing(training_batches(config, parts, world, Progress())) as batches:
        for _ in range(steps):
            engine.step(next(batches))
    return engine


def peak_allocated(work: Callable[[], object]) -> int:
    """Return the most bytes that torch's CPU allocator had given out during `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.experimental_event_tree()
    allocations = sorted(
        (event for event in _all(events) if event.tag == _EventType.Allocation),
        key=lambda event: event.start_time_ns,
    )
    totals = [event.extra_fields.total_allocated for event in allocations]
    # What earlier uses of the profiler did not see the end of is still counted.
    return max(totals) - (totals[0] - allocations[0].extra_fields.alloc_size)


def _all(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


if __name__ == "__main__":
    sys.exit(main())
