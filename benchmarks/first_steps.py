"""Take some steps with each loop in one process: `python -m benchmarks.first_steps`.

A first look at a machine in about a minute: DDP and FSDP2 by hand and distmp, in bfloat16 on GPUs
and in FP32 on CPUs, print a line each as they end. `benchmarks.peers` compares them with more care,
in processes of their own that take turns. With several GPUs:
`torchrun --nproc-per-node=gpu -m benchmarks.first_steps --device cuda`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device import elapsed, parse, parser
from benchmarks.loops import BF16, MICROBATCHES, VOCABULARY, Distmp, Fsdp2, Loop, TorchDDP, Work
from benchmarks.peak import transformer_flops
from benchmarks.report import machine, save, sized
from benchmarks.tables import steps
from distmp.distributed.world import local_device
from distmp.models.settings import ModelConfig
from distmp.telemetry.measurements import begin_peak, peak_since

LOOPS: dict[str, Callable[[Work], Loop]] = {
    "torch DDP": lambda work: TorchDDP(work, _dtype(work)),
    "distmp, ddp": lambda work: _distmp(work, "ddp"),
    "FSDP2 by hand": lambda work: Fsdp2(work, _dtype(work)),
    "distmp, fsdp": lambda work: _distmp(work, "fsdp"),
}
SIZES = {"cpu": "1m", "cuda": "350m"}
# Samples per microbatch and tokens per sample.
SHAPES = {"cpu": (2, 128), "cuda": (8, 1024)}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", help="size of the transformer (default: 1m, on a GPU 350m)")
    options.add_argument("--steps", type=int, default=sized(10, 1), help="measured steps")
    arguments = parse(options, size=SIZES)
    kind = arguments.device.type
    if kind == "cpu":
        torch.set_num_threads(1)
    rank, world_size = _join(kind)
    device = local_device(int(os.environ["LOCAL_RANK"])) if kind == "cuda" else arguments.device
    work = Work(ModelConfig(size=arguments.size), device, *SHAPES[kind])
    result: dict[str, Any] = {
        "machine": machine(device),
        "size": arguments.size,
        "ranks": world_size,
        "tokens": world_size * work.tokens,
        "flops": world_size
        * MICROBATCHES
        * transformer_flops(arguments.size, work.samples, work.length, VOCABULARY),
        "loops": {},
    }
    for name, make in LOOPS.items():
        result["loops"][name] = _measured(make, work, arguments.steps)
        if rank == 0:
            print(steps.first_steps_line(name, result), flush=True)
            save(f"first-steps-{kind}", result)  # after each loop, because of the time limit
    if rank == 0:
        print(steps.first_steps(result))
    dist.destroy_process_group()
    return 0


def _dtype(work: Work) -> torch.dtype | None:
    return None if work.device.type == "cpu" else BF16


def _distmp(work: Work, strategy: str) -> Loop:
    return Distmp(work, "fp32" if _dtype(work) is None else "bf16", strategy)


def _join(kind: str) -> tuple[int, int]:
    """Join the ranks of torchrun, or be the only one; return rank and number of ranks."""
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = "0"
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **alone)
    return dist.get_rank(), dist.get_world_size()


def _measured(make: Callable[[Work], Loop], work: Work, count: int) -> dict[str, Any]:
    """Return the seconds of some steps, the peak of memory and the loss of the last step."""
    base = begin_peak(work.device)
    loop = make(work)
    for _ in range(2):  # DDP rebuilds its buckets in the second step
        loop.step()
    seconds = [elapsed(loop.step, work.device) for _ in range(count)]
    found = {"seconds": seconds, "memory": peak_since(base, work.device), "loss": loop.loss()}
    del loop
    if work.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    sys.exit(main())
