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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.explain_memory import CPU, peak_allocated, stepper
from benchmarks.report import machine, save, sized
from benchmarks.tables import runs
from distmp.commands.explain.explanation import predict
from distmp.config import RunConfig, load
from distmp.precision import policy

REAL = sized((2, 4), (2,))
COMPUTED = sized((8, 64, 512, 4096), (8,))
# The ranks of a machine share its free memory, which determines where gradients are accumulated.
RANKS_PER_MACHINE = 8
STEPS = 3
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
