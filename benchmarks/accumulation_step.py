"""Time and memory of a step of 8 microbatches: `python -m benchmarks.accumulation_step`.

A transformer of 22 M parameters on two CPU ranks over gloo, by every way, each in processes of its
own. For time all of them are alive and take turns of one step. Memory is measured in fresh
processes: the largest resident set during a step, less what was resident before the model was
built, compiled kernels included; beside it the tensors that were alive. The update is plain SGD, so
that no optimizer state counts; then the same for AdamW at two and four ranks.

`--device cuda` takes one rank for each GPU, a larger model and larger microbatches, memory as
torch's allocator has given it out, and AdamW on one rank and on two that share the GPU over gloo.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from benchmarks import memory
from benchmarks.accumulation_ways import (
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
from benchmarks.report import machine, save
from benchmarks.tables import accumulation
from distmp.distributed.world import World
from distmp.telemetry.memory import begin_peak, peak_since

MICROBATCHES = 8


class Shape(NamedTuple):
    """The model that is trained, and its microbatches."""

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
ADAMW_RANKS = {"cpu": (2, 4), "cuda": (1, 2)}


class Rank:
    """What one rank of a way answers to the orders of the main process.

    Args:
        described: The way and the named size, as `_described` has them.
        world: Of this rank.
    """

    def __init__(self, described: str, world: World) -> None:
        way, size = described.split("|")
        self._device = world.device
        self._shape = SHAPES[world.device.type]._replace(size=size)
        self._build = {**METHODS, **OPTIMIZERS}[way]
        self._parameters = self._warm_up()
        self._build(self._task("1m")).step(MICROBATCHES)
        self._base = begin_peak(self._device)
        self._way = self._build(self._task(size))

    def answer(self, order: str) -> Any:
        """Do what `order` names."""
        return {"time": self.time, "peak": self.peak, "live": self.live}[order]()

    def time(self) -> float:
        """Return the seconds of one step."""
        return elapsed_together(lambda: self._way.step(MICROBATCHES), self._device)

    def peak(self) -> dict[str, float]:
        """Return bytes in use per parameter: at most in a step, and after it."""
        _settle(self._way)
        begin_peak(self._device)
        self._way.step(MICROBATCHES)
        peak = peak_since(self._base, self._device)
        between = begin_peak(self._device) - self._base
        return {"peak": peak / self._parameters, "between_steps": between / self._parameters}

    def live(self) -> dict[str, float]:
        """Return bytes per parameter of the tensors that are alive at once, at most."""
        live = memory.LiveStorages()
        with live:
            way = self._build(self._task(self._shape.size))
            _settle(way)
            live.peak = 0  # building may take more
            way.step(2)
        return {"live_tensors_peak": live.peak / self._parameters}

    def _task(self, size: str) -> Task:
        return transformer(size, MICROBATCHES, *self._shape[1:], self._device)

    def _warm_up(self) -> int:
        """Have kernels for these shapes compiled, which stay in memory; count the parameters."""
        for autocast in (False, True):
            task = self._task(self._shape.size)
            model = task.make_model().to(torch.float32 if autocast else torch.bfloat16)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=autocast):
                loss = task.mean_loss(model, task.batches[0], 1)
            loss.backward()
        return sum(parameter.numel() for parameter in model.parameters())


def _settle(way: AccumulationMethod) -> None:
    """Take the steps after which nothing new is allocated; DDP sorts its buckets in the second."""
    for _ in range(2):
        way.step(1)


def main() -> int:
    if is_rank():
        return serve(lambda way, world: Rank(way, world).answer)
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
    kept = save(f"accumulation-step-{arguments.device.type}", result)
    print(accumulation.accumulation_step(result))
    print(f"kept in {kept}")
    return 0


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=8, ranks=True)
    made.add_argument("--size", help="of the transformer (default: 22m, on a GPU 350m)")
    return parse(made, size={device: shape.size for device, shape in SHAPES.items()})


def _memory(
    ways: list[str], arguments: argparse.Namespace, ranks: int, *orders: str
) -> dict[str, dict[str, float]]:
    """Return what the ranks of each way answer to all orders, the largest number of each kind."""
    found = {}
    for way in ways:
        try:
            with _started(way, arguments, ranks, memory.EXACT_MALLOC) as started:
                answers = [answer for order in orders for answer in started.ask(order)]
        except RankError as error:
            print(f"left out: {way} on {ranks} ranks: {error}", file=sys.stderr)
            continue
        names = dict.fromkeys(name for answer in answers for name in answer)
        found[way] = {name: max(one.get(name, 0.0) for one in answers) for name in names}
    return found


def _memory_with_adamw(arguments: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    by_way: dict[str, dict[int, dict[str, float]]] = {way: {} for way in OPTIMIZERS}
    for ranks in ADAMW_RANKS[arguments.device.type]:
        for way, found in _memory(list(OPTIMIZERS), arguments, ranks, "peak").items():
            by_way[way][ranks] = found
    return by_way


def _times(arguments: argparse.Namespace) -> dict[str, list[float]]:
    with ExitStack() as stack:
        ways = {
            way: stack.enter_context(_started(way, arguments, arguments.ranks)) for way in METHODS
        }
        return take_turns(ways, "time", arguments.rounds)


def _started(
    way: str,
    arguments: argparse.Namespace,
    ranks: int,
    environment: dict[str, str] | None = None,
) -> Ranks:
    device = arguments.device.type
    described = f"{way}|{arguments.size}"
    return Ranks("benchmarks.accumulation_step", described, ranks, environment, device)


if __name__ == "__main__":
    sys.exit(main())
