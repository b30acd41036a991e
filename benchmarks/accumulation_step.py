"""Time and memory of a step of 8 microbatches: `python -m benchmarks.accumulation_step`.

A transformer of 22 M parameters on two CPU ranks over gloo, with every method in separate
processes. For time, all of them run at once and take turns of one step. Memory is measured in new
processes: the peak resident set during a step minus the resident set before the model was built,
which includes compiled kernels; and the live tensors. The update is plain SGD, which has no
optimizer state; memory is also measured with AdamW on two and four ranks.

`--device cuda` uses one rank per GPU, a larger model and larger microbatches, the memory of torch's
allocator, and AdamW on one rank and on two that share the GPU over gloo.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from benchmarks import memory
from benchmarks.accumulation_methods import (
    DDP_AUTOCAST,
    DDP_BF16,
    METHODS,
    VOCABULARY,
    AccumulationMethod,
    DistmpEngine,
    Task,
    transformer,
)
from benchmarks.device import parse, parser
from benchmarks.peak import transformer_flops
from benchmarks.ranks import RankError, Ranks, elapsed_together, is_rank, serve, take_turns
from benchmarks.report import machine, save, sized
from benchmarks.tables import accumulation
from distmp.distributed.world import World
from distmp.telemetry.measurements import begin_peak, peak_since

MICROBATCHES = 8


class Shape(NamedTuple):
    """The size of the model and of its microbatches."""

    size: str
    samples: int
    length: int


SHAPES = {"cpu": Shape("22m", 1, 128), "cuda": Shape("350m", 4, 1024)}
OPTIMIZERS: dict[str, Callable[[Task], AccumulationMethod]] = {
    "AdamW": lambda task: DistmpEngine(task, torch.optim.AdamW),
    "AdamW, shard_optimizer": lambda task: DistmpEngine(
        task, torch.optim.AdamW, shard_optimizer=True
    ),
}
# Numbers of ranks on which memory with AdamW is measured.
ADAMW_RANKS = {"cpu": sized((2, 4), (2,)), "cuda": (1, 2)}


class Rank:
    """Runs the measurements of a method on one rank.

    Args:
        described: The method and the named size, separated by "|".
        world: The process group of this rank.
    """

    def __init__(self, described: str, world: World) -> None:
        method, size = described.split("|")
        self._device = world.device
        self._shape = SHAPES[world.device.type]._replace(size=size)
        self._build = {**METHODS, **OPTIMIZERS}[method]
        self._parameters = self._warm_up()
        self._build(self._task("1m")).step(MICROBATCHES)
        self._base = begin_peak(self._device)
        self._method = self._build(self._task(size))

    def answer(self, order: str) -> Any:
        """Run the measurement named by `order`."""
        return {"time": self.time, "peak": self.peak, "live": self.live}[order]()

    def time(self) -> float:
        """Return the seconds of one step."""
        return elapsed_together(lambda: self._method.step(MICROBATCHES), self._device)

    def peak(self) -> dict[str, float]:
        """Return the bytes per parameter at the peak of a step, and after the step."""
        _settle(self._method)
        begin_peak(self._device)
        self._method.step(MICROBATCHES)
        peak = peak_since(self._base, self._device)
        between = begin_peak(self._device) - self._base
        return {"peak": peak / self._parameters, "between_steps": between / self._parameters}

    def live(self) -> dict[str, float]:
        """Return the peak bytes per parameter of live tensors."""
        live = memory.LiveStorages()
        with live:
            method = self._build(self._task(self._shape.size))
            _settle(method)
            live.peak = 0  # building may need more
            method.step(2)
        return {"live_tensors_peak": live.peak / self._parameters}

    def _task(self, size: str) -> Task:
        return transformer(size, MICROBATCHES, *self._shape[1:], self._device)

    def _warm_up(self) -> int:
        """Compile kernels for these shapes, which stay in memory; return the parameter count."""
        for autocast in (False, True):
            task = self._task(self._shape.size)
            model = task.make_model().to(torch.float32 if autocast else torch.bfloat16)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=autocast):
                loss = task.mean_loss(model, task.batches[0], 1)
            loss.backward()
        return sum(parameter.numel() for parameter in model.parameters())


def _settle(method: AccumulationMethod) -> None:
    """Run the steps that allocate; DDP rebuilds its buckets in the second."""
    for _ in range(2):
        method.step(1)


def main() -> int:
    if is_rank():
        return serve(lambda method, world: Rank(method, world).answer)
    arguments = _arguments()
    shape = SHAPES[arguments.device.type]._replace(size=arguments.size)
    orders = ("peak", "live") if arguments.device.type == "cpu" else ("peak",)
    result = {
        "machine": machine(arguments.device),
        "size": shape.size,
        "ranks": arguments.ranks,
        "microbatches": MICROBATCHES,
        "tokens_per_microbatch": shape.samples * shape.length,
        "flops": MICROBATCHES * transformer_flops(*shape, VOCABULARY),
        "memory": _memory(list(METHODS), arguments, arguments.ranks, *orders),
        "memory_with_adamw": _memory_with_adamw(arguments),
        "references": {"autocast": DDP_AUTOCAST, "bf16": DDP_BF16},
        "seconds": _times(arguments),
    }
    path = save(f"accumulation-step-{arguments.device.type}", result)
    print(accumulation.accumulation_step(result))
    print(f"saved to {path}")
    return 0


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, rounds=8, ranks=True)
    options.add_argument("--size", help="size of the transformer (default: 22m, on a GPU 350m)")
    return parse(options, size={device: shape.size for device, shape in SHAPES.items()})


def _memory(
    methods: list[str], arguments: argparse.Namespace, ranks: int, *orders: str
) -> dict[str, dict[str, float]]:
    """Return the maximum over the ranks of each measurement, by method."""
    found = {}
    for method in methods:
        try:
            with _started(method, arguments, ranks, memory.EXACT_MALLOC) as started:
                answers = [answer for order in orders for answer in started.ask(order)]
        except RankError as error:
            print(f"skipped: {method} on {ranks} ranks: {error}", file=sys.stderr)
            continue
        names = dict.fromkeys(name for answer in answers for name in answer)
        found[method] = {name: max(one.get(name, 0.0) for one in answers) for name in names}
    return found


def _memory_with_adamw(arguments: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    by_method: dict[str, dict[int, dict[str, float]]] = {method: {} for method in OPTIMIZERS}
    for ranks in ADAMW_RANKS[arguments.device.type]:
        for method, found in _memory(list(OPTIMIZERS), arguments, ranks, "peak").items():
            by_method[method][ranks] = found
    return by_method


def _times(arguments: argparse.Namespace) -> dict[str, list[float]]:
    with ExitStack() as stack:
        methods = {
            method: stack.enter_context(_started(method, arguments, arguments.ranks))
            for method in METHODS
        }
        return take_turns(methods, "time", arguments.rounds)


def _started(
    method: str,
    arguments: argparse.Namespace,
    ranks: int,
    environment: dict[str, str] | None = None,
) -> Ranks:
    device = arguments.device.type
    described = f"{method}|{arguments.size}"
    return Ranks("benchmarks.accumulation_step", described, ranks, environment, device)


if __name__ == "__main__":
    sys.exit(main())
