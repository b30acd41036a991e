"""Compare 8, 64 and 512 microbatches: `python -m benchmarks.accumulation_microbatches`.

Every accumulation method runs the same microbatches through the same model of a million parameters,
on two CPU ranks over gloo, in separate processes per method.

- Error: relative L2 error of the gradient of the update, compared with the float64 mean of plain
  autograd's gradients of each microbatch, in the compute dtype of the method. The difference is the
  error of accumulation and reduction.
- Time: a step of plain SGD; all methods run at the same time and take turns.
- Memory: peak bytes of live tensors during a step, without the microbatches.

It takes five minutes on two cores. `--device cuda` uses a larger model and one rank per GPU.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.accumulation_methods import (
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
from benchmarks.report import machine, save, sized
from benchmarks.tables import accumulation
from distmp.distributed.world import World
from distmp.telemetry.measurements import begin_peak, peak_since

COUNTS = sized((8, 64, 512), (8,))


class Shape(NamedTuple):
    """The shape of the model, the number of different microbatches, and their samples."""

    width: int
    depth: int
    batches: int
    samples: int


SHAPES = {"cpu": Shape(512, 4, max(COUNTS), 8), "cuda": Shape(4096, 8, max(COUNTS), 64)}


class Rank:
    """Runs the measurements of a method on one rank."""

    def __init__(self, method: str, world: World) -> None:
        self._world = world
        self._build, self._autocast = METHODS[method], method == DDP_AUTOCAST
        shape = SHAPES[world.device.type]
        # Load kernels and libraries, which stay in memory; all layers have the same shape.
        self._build(self._make_task(shape._replace(depth=1, batches=2))).step(2)
        self._task = self._make_task(shape)
        self._method = self._build(self._task)

    def _make_task(self, shape: Shape) -> Task:
        return regression(*shape, self._world.rank, self._world.device)

    def answer(self, order: str) -> Any:
        """Run the measurement and number of microbatches in `order`, such as "error 64"."""
        name, count = order.split()
        return {"error": self.error, "time": self.time, "peak": self.peak}[name](int(count))

    def error(self, count: int) -> float:
        """Return the relative error of the accumulated gradient."""
        gradients = self._build(self._task).gradients(count)
        exact = self._exact(count)
        assert gradients.keys() == exact.keys()
        errors = torch.stack([(gradients[name].double() - exact[name]).norm() for name in exact])
        norms = torch.stack([one.norm() for one in exact.values()])
        return (errors.norm() / norms.norm()).item()

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
        return elapsed_together(lambda: self._method.step(count), self._world.device)

    def peak(self, count: int) -> float:
        """Return the peak memory in bytes per parameter of a step after the first ones."""
        if self._world.device.type == "cuda":
            base = begin_peak(self._world.device)
            method = self._settled()
            begin_peak(self._world.device)
            method.step(count)
            peak = peak_since(base, self._world.device)
        else:
            with LiveStorages() as live:
                method = self._settled()
                peak = min(self._peak_of_step(live, method, count) for _ in range(3))
        return peak / sum(parameter.numel() for parameter in self._task.make_model().parameters())

    @staticmethod
    def _peak_of_step(live: LiveStorages, method: AccumulationMethod, count: int) -> int:
        """Return the peak of one step; buffers of a late rank's collectives raise it."""
        live.peak = 0
        method.step(count)
        return live.peak

    def _settled(self) -> AccumulationMethod:
        """Return a new method after its first steps; DDP rebuilds its buckets in the second."""
        method = self._build(self._task)
        for _ in range(2):
            method.step(min(COUNTS))
        return method


def main() -> int:
    if is_rank():
        return serve(lambda method, world: Rank(method, world).answer)
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
    path = save(f"accumulation-microbatches-{arguments.device.type}", result)
    print(accumulation.accumulation_microbatches(result))
    print(f"saved to {path}")
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """Return error, bytes per parameter and seconds by method and number of microbatches."""
    methods: dict[str, dict[str, dict[str, Any]]] = {
        method: {str(count): {} for count in COUNTS} for method in METHODS
    }
    with ExitStack() as stack:
        module, device = "benchmarks.accumulation_microbatches", arguments.device.type
        running = {
            method: stack.enter_context(Ranks(module, method, arguments.ranks, device=device))
            for method in METHODS
        }
        for count in COUNTS:
            for method, found in methods.items():
                ranks = running[method]
                found[str(count)]["error"] = largest(method, ranks, f"error {count}")
                found[str(count)]["bytes_per_parameter"] = largest(method, ranks, f"peak {count}")
            for method, seconds in take_turns(running, f"time {count}", arguments.rounds).items():
                methods[method][str(count)]["seconds"] = seconds
    return methods


if __name__ == "__main__":
    sys.exit(main())
