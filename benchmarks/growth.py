"""How a step grows with the number of ranks: `python -m benchmarks.growth`.

Memory and bytes on the wire of a rank, as `distmp explain` predicts them for 1 to 4,096 ranks, and
as real steps on 1, 2 and 4 CPU ranks have them, for a transformer of 22 M parameters. Every rank
computes the same number of samples, so that more ranks make a larger batch. Four minutes on two
cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks import figures
from benchmarks.explain_memory import CPU, peak_allocated, stepper
from benchmarks.report import machine, save
from distmp.config import RunConfig, load
from distmp.explain.explanation import predict
from distmp.explain.wire import Wire
from distmp.precision import policy

REAL = (1, 2, 4)
COMPUTED = (8, 64, 512, 4096)
STEPS = 3
SAMPLES_PER_RANK = 2
COMMON = (
    "--model.size=22m",
    "--data.sequence-length=64",
    "--batch.microbatch-size=1",
    "--precision.policy=bf16",
    "--precision.attribution=false",
    "--schedule.warmup-steps=0",
)
WAYS = {
    "`ddp`": ("--strategy=ddp",),
    "`ddp`, `shard_optimizer`": ("--strategy=ddp", "--shard-optimizer=true"),
    "`fsdp`": ("--strategy=fsdp",),
}


def main() -> int:
    ways: dict[str, dict[str, Any]] = {}
    for name, options in WAYS.items():
        ways[name] = {}
        for ranks in (*REAL, *COMPUTED):
            config = configuration(options, ranks)
            found = _predicted(config, ranks)
            if ranks in REAL:
                found |= measure(config, ranks)
            ways[name][str(ranks)] = found
            print(name, ranks, found, flush=True)
    result = {"machine": machine(), "samples_per_rank": SAMPLES_PER_RANK, "ways": ways}
    print(figures.growth(result))
    print(f"kept in {save('growth-cpu', result)}")
    return 0


def configuration(options: tuple[str, ...], ranks: int) -> RunConfig:
    """Return the run of a way on so many ranks."""
    return load([*COMMON, *options, f"--batch.global-batch-size={SAMPLES_PER_RANK * ranks}"])


def _predicted(config: RunConfig, ranks: int) -> dict[str, float]:
    predicted = predict(config, policy("bf16"), ranks, CPU)
    return {"memory": predicted.memory_bytes, "wire": predicted.wire_bytes}


def measure(config: RunConfig, ranks: int) -> dict[str, float]:
    """Return memory, sent bytes and seconds of a step of the first rank of a real run."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (config, ranks, folder), nprocs=ranks)
        found: dict[str, float] = json.loads(Path(folder, "found").read_text())
        return found


def _rank(rank: int, config: RunConfig, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    step = stepper(config)
    memory = peak_allocated(step)
    with Wire() as wire:
        step()
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        found = {
            "measured_memory": memory,
            "measured_wire": round(sum(one.nbytes for one in wire.sent)),
            "seconds": statistics.median(seconds),
        }
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
