"""Measure the engine's host time per microbatch: `python -m benchmarks.host_cost`.

Two comparisons, in processor time of a rank, with a model whose microbatch takes about 2 ms:

- With torch's DDP (`no_sync` in all microbatches but the last, fused AdamW), on two ranks that
  communicate over gloo.
- Between numbers of ranks, with simulated process groups, whose collectives return at once. The
  work of the other ranks is left out, so only the work of this rank can grow with the number of
  ranks. The simulated all-gather copies a piece for each rank, which a real one does not do on the
  host.

The processes of all methods run at the same time and take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import distmp
from benchmarks.device import parse, parser
from benchmarks.ranks import Ranks, is_rank, serve, take_turns
from benchmarks.report import machine, save, sized
from benchmarks.tables import steps
from distmp.distributed.world import World, leave
from distmp.engine.outcome import StepOutcome

PRETENDED = sized((8, 64, 512, 1024), (8, 16))
POLICIES = ("fp32", "bf16-autocast")
COMMUNICATION = ("fp32", "fp32,reduce=bf16")
WIDTH, BLOCKS, SAMPLES = 64, 8, 16

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A residual block with six parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the block to its input."""
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + hidden


def build_model() -> nn.Module:
    """Return a model of 50 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 10))


def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    """Return the loss sum and the number of samples."""
    inputs, labels = batch
    return F.cross_entropy(module(inputs).float(), labels, reduction="sum"), float(len(labels))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Build a fused optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def ddp_step(policy: str) -> Callable[[list[Batch]], None]:
    """Return a step of torch's DDP that accumulates microbatches."""
    model = nn.parallel.DistributedDataParallel(build_model())
    optimizer = adamw(model.parameters())
    autocast = policy == "bf16-autocast"

    def step(batches: list[Batch]) -> None:
        optimizer.zero_grad()
        weight = sum(len(labels) for _, labels in batches)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    total, _ = loss(model, batch)
                (total / weight).backward()
        optimizer.step()

    return step


def engine_step(policy: str) -> Callable[[list[Batch]], object]:
    """Return a step of the engine."""
    return distmp.Engine(
        build_model(),
        loss,
        adamw,
        policy=policy,
        strategy="ddp",
        device="cpu",
        first_step_checks=False,
    ).step


def pretend(world_size: int) -> None:
    """Replace the process group by one whose collectives return at once."""
    leave()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    # Ranks cannot differ.
    mock.patch.object(StepOutcome, "ranks_differ", False).start()


def make(method: str, world: World) -> Callable[[str], float]:
    """Return the measurement of a method: processor milliseconds per microbatch."""
    if method.isdigit():
        pretend(int(method))
    build = ddp_step if method == "DDP" else engine_step
    made: dict[str, Callable[[list[Batch]], object]] = {}

    def measure(order: str) -> float:
        policy, count = order.rsplit(" ", 1)
        if policy not in made:
            made[policy] = build(policy)
        batches = [
            (torch.randn(SAMPLES, WIDTH), torch.randint(10, (SAMPLES,))) for _ in range(int(count))
        ]
        gc.collect()
        started = time.process_time()
        made[policy](batches)
        return 1000 * (time.process_time() - started) / len(batches)

    return measure


def main() -> int:
    if is_rank():
        return serve(make)
    arguments = _arguments()
    result = {
        "machine": machine("cpu"),
        "microbatches": arguments.microbatches,
        "beside_ddp": _measure(["DDP", "distmp"], 2, POLICIES, arguments),
        "pretended": _measure([str(n) for n in PRETENDED], 1, COMMUNICATION, arguments),
    }
    print(steps.host_cost(result))
    print(f"saved to {save('host-cost-cpu', result)}")
    return 0


def _measure(
    methods: list[str], ranks: int, policies: tuple[str, ...], arguments: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    with contextlib.ExitStack() as stack:
        started = {
            method: stack.enter_context(Ranks("benchmarks.host_cost", method, ranks))
            for method in methods
        }
        return {
            policy: take_turns(started, f"{policy} {arguments.microbatches}", arguments.rounds)
            for policy in policies
        }


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, rounds=25)
    options.add_argument("--microbatches", type=int, default=32, help="microbatches of a step")
    return parse(options)


if __name__ == "__main__":
    sys.exit(main())
