"""What 8, 64 and 512 microbatches do: `python -m benchmarks.accumulation_microbatches`.

Every way to accumulate in bfloat16 takes the same microbatches through the same model, of a million
parameters on two CPU ranks over gloo, each way in processes of its own.

- Error: relative L2 distance of the gradient that the update sees from the float64 mean of the
  gradients that plain autograd has for each microbatch, in the types that the way computes in. What
  is left is the error of accumulating and reducing.
- Time: a step of plain SGD; the ways are all alive and take turns.
- Memory: the most bytes of tensors that are alive at once during a step, without the microbatches.

Five minutes on two cores. `--device cuda` takes a larger model and one rank for each GPU.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.accumulation_ways import (
    DDP_AUTOCAST,
    DDP_BF16,
    METHODS,
    AccumulationMethod,
    Task,
    regression,
)
from benchmarks.device import parse, parser
from benchmarks.memory import LiveStorages
from benchmarks.peak import model_flops
from benchmarks.ranks import Ranks, elapsed_together, is_rank, largest, serve, take_turns
from benchmarks.report import machine, save
from benchmarks.tables import accumulation
from distmp.distributed.world import World
from distmp.telemetry.memory import begin_peak, peak_since

COUNTS = (8, 64, 512)


class Shape(NamedTuple):
    """The model that is trained, and how many different microbatches of how many samples."""

    width: int
    depth: int
    batches: int
    samples: int


SHAPES = {"cpu": Shape(512, 4, max(COUNTS), 8), "cuda": Shape(4096, 8, max(COUNTS), 64)}


class Rank:
    """What one rank of a way answers to the orders of the main process."""

    def __init__(self, way: str, world: World) -> None:
        self._world = world
        self._build, self._autocast = METHODS[way], way == DDP_AUTOCAST
        shape = SHAPES[world.device.type]
        # Kernels are made, and libraries loaded, for good; all layers are alike.
        self._build(self._make_task(shape._replace(depth=1, batches=2))).step(2)
        self._task = self._make_task(shape)
        self._way = self._build(self._task)

    def _make_task(self, shape: Shape) -> Task:
        return regression(*shape, self._world.rank, self._world.device)

    def answer(self, order: str) -> Any:
        """Do what `order` names, with as many microbatches as it says behind it."""
        name, count = order.split()
        return {"error": self.error, "time": self.time, "peak": self.peak}[name](int(count))

    def error(self, count: int) -> float:
        """Return the relative error of the accumulated gradient."""
        found = self._build(self._task).gradients(count)
        exact = self._exact(count)
        assert found.keys() == exact.keys()
        apart = torch.stack([(found[name].double() - exact[name]).norm() for name in exact])
        whole = torch.stack([one.norm() for one in exact.values()])
        return (apart.norm() / whole.norm()).item()

    def _exact(self, count: int) -> dict[str, Tensor]:
        """Return the float64 mean of the gradients of single microbatches, over all ranks."""
        task = self._task
        model = task.make_model().to(torch.float32 if self._autocast else torch.bfloat16)
        named = dict(model.named_parameters())
        total = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in named.items()}
        for batch in task.microbatches(count):
            with torch.autocast(task.device.type, torch.bfloat16, enabled=self._autocast):
                loss = task.mean_loss(model, batch, count)
            for name, gradient in zip(
                named, torch.autograd.grad(loss, list(named.values())), strict=True
            ):
                total[name] += gradient
        for one in total.values():
            dist.all_reduce(one)
            one /= self._world.world_size
        return total

    def time(self, count: int) -> float:
        """Return the seconds of one step."""
        return elapsed_together(lambda: self._way.step(count), self._world.device)

    def peak(self, count: int) -> float:
        """Return the most bytes per parameter in use during a step that is not the first."""
        if self._world.device.type == "cuda":
            base = begin_peak(self._world.device)
            way = self._settled()
            begin_peak(self._world.device)
            way.step(count)
            peak = peak_since(base, self._world.device)
        else:
            with LiveStorages() as live:
                way = self._settled()
                live.peak = 0  # building may take more
                way.step(count)
            peak = live.peak
        return peak / sum(parameter.numel() for parameter in self._task.make_model().parameters())

    def _settled(self) -> AccumulationMethod:
        """Return a new way that has taken its first steps; DDP sorts its buckets in the second."""
        way = self._build(self._task)
        for _ in range(2):
            way.step(min(COUNTS))
        return way


def main() -> int:
    if is_rank():
        return serve(lambda way, world: Rank(way, world).answer)
    arguments = parse(parser(__doc__, rounds=3, ranks=True))
    shape = SHAPES[arguments.device.type]
    meta = regression(*shape._replace(batches=1), 0, torch.device("meta"))
    result = {
        "machine": machine(arguments.device),
        "ranks": arguments.ranks,
        "microbatches": COUNTS,
        "parameters": sum(one.numel() for one in meta.make_model().parameters()),
        "samples": shape.samples,
        "flops": model_flops(meta.make_model(), meta.loss, meta.batches[0]),
        "reference": DDP_BF16,
        "ways": _measure(arguments),
    }
    kept = save(f"accumulation-microbatches-{arguments.device.type}", result)
    print(accumulation.accumulation_microbatches(result))
    print(f"kept in {kept}")
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """Return error, bytes per parameter and seconds by way and number of microbatches."""
    ways: dict[str, dict[str, dict[str, Any]]] = {
        way: {str(count): {} for count in COUNTS} for way in METHODS
    }
    with ExitStack() as stack:
        module, device = "benchmarks.accumulation_microbatches", arguments.device.type
        alive = {
            way: stack.enter_context(Ranks(module, way, arguments.ranks, device=device))
            for way in METHODS
        }
        for count in COUNTS:
            for way, found in ways.items():
                found[str(count)]["error"] = largest(way, alive[way], f"error {count}")
                found[str(count)]["bytes_per_parameter"] = largest(way, alive[way], f"peak {count}")
            for way, seconds in take_turns(alive, f"time {count}", arguments.rounds).items():
                ways[way][str(count)]["seconds"] = seconds
    return ways


if __name__ == "__main__":
    sys.exit(main())
