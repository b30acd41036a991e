"""Time and memory of a step of 8 microbatches: `python -m benchmarks.accumulation_step`.

A transformer of 22 M parameters on two CPU ranks over gloo, by every way, each in processes of its
own. For time all of them are alive and take turns of one step. Memory is measured in fresh
processes: the largest resident set during a step, less what was resident before the model was
built, compiled kernels included; beside it the tensors that were alive. The update is plain SGD, so
that no optimizer state counts; then the same for AdamW at two and four ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import figures, memory
from benchmarks.ranks import Ranks, is_rank, serve
from benchmarks.report import alternating, machine, save
from distmp import Engine, Fp32GradBuckets
from distmp.models.build import build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.parallel.blocks import find_blocks
from distmp.telemetry.memory import begin_peak, peak_since

CPU = torch.device("cpu")
MICROBATCHES = 8
VOCABULARY, LENGTH = 258, 128
RATE = 1e-4


class Way(ABC):
    """A model that trains on the same microbatches in every step."""

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        self.model = build_model(ModelConfig(size=size), VOCABULARY, LENGTH)
        tokens = torch.randint(VOCABULARY, (MICROBATCHES, 1, LENGTH + 1))
        self.batches = [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in tokens]

    @abstractmethod
    def step(self, count: int = MICROBATCHES) -> None:
        """Train on the first `count` microbatches."""

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss whose gradients add up to that of the mean over microbatches."""
        return next_token_loss(model, batch)[0] / (LENGTH * MICROBATCHES)


class TorchDDP(Way):
    """torch's DDP, reducing in the last microbatch."""

    def __init__(self, size: str, *, autocast: bool) -> None:
        super().__init__(size)
        self._autocast = autocast
        module = self.model if autocast else self.model.bfloat16()
        self._ddp = DistributedDataParallel(module)
        self._optimizer = torch.optim.SGD(module.parameters(), RATE, fused=True)

    def step(self, count: int = MICROBATCHES) -> None:
        for index, batch in enumerate(self.batches[:count]):
            self._ddp.require_backward_grad_sync = index == count - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                loss = self.mean_loss(self._ddp, batch)
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class Fsdp2(Way):
    """FSDP2 per block, bfloat16 compute and FP32 reduction in the last microbatch."""

    def __init__(self, size: str) -> None:
        super().__init__(size)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in find_blocks(self.model).values():
            fully_shard(block, mp_policy=policy)
        self._sharded = fully_shard(self.model, mp_policy=policy)
        self._optimizer = torch.optim.SGD(self.model.parameters(), RATE)

    def step(self, count: int = MICROBATCHES) -> None:
        for index, batch in enumerate(self.batches[:count]):
            self._sharded.set_requires_gradient_sync(index == count - 1)
            self.mean_loss(self.model, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class Buckets(Way):
    """distmp's buckets by themselves, with bfloat16 parameters and no masters."""

    def __init__(self, size: str) -> None:
        super().__init__(size)
        self.model.bfloat16()
        self._buckets = Fp32GradBuckets(self.model.named_parameters(), dist.group.WORLD)

    def step(self, count: int = MICROBATCHES) -> None:
        self._buckets.begin_step()
        for index, batch in enumerate(self.batches[:count]):
            self._buckets.begin_microbatch(last=index == count - 1)
            self.mean_loss(self.model, batch).backward()
            self._buckets.end_microbatch()
        self._buckets.finish()
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-RATE)


class DistmpEngine(Way):
    """distmp's whole step, with FP32 masters."""

    def __init__(self, size: str, optimizer: Callable[..., Any], **options: bool) -> None:
        super().__init__(size)
        self._engine = Engine(
            self.model,
            next_token_loss,
            lambda parameters: optimizer(parameters, RATE, fused=True),
            policy="bf16",
            strategy="ddp",
            **options,  # type: ignore[arg-type]
        )

    def step(self, count: int = MICROBATCHES) -> None:
        self._engine.step(self.batches[:count])


DDP_BF16 = "torch DDP, bf16 parameters"
DDP_AUTOCAST = "torch DDP, fp32 parameters, bf16 autocast"

STEPS: dict[str, Callable[[str], Way]] = {
    DDP_BF16: lambda size: TorchDDP(size, autocast=False),
    DDP_AUTOCAST: lambda size: TorchDDP(size, autocast=True),
    "FSDP2, bf16 compute, fp32 reduce": Fsdp2,
    "distmp.Fp32GradBuckets, bf16 parameters": Buckets,
    "distmp.Engine, bf16, FP32 masters": lambda size: DistmpEngine(size, torch.optim.SGD),
    "the same, reproducible": lambda size: DistmpEngine(size, torch.optim.SGD, reproducible=True),
}
OPTIMIZERS: dict[str, Callable[[str], Way]] = {
    "AdamW": lambda size: DistmpEngine(size, torch.optim.AdamW),
    "AdamW, shard_optimizer": lambda size: DistmpEngine(
        size, torch.optim.AdamW, shard_optimizer=True
    ),
}


class Rank:
    """What one rank of a way answers to the orders of the main process."""

    def __init__(self, way: str) -> None:
        self._build = {**STEPS, **OPTIMIZERS}[way]
        self._parameters = _warm_up()
        self._build("1m").step()
        self._base = begin_peak(CPU)
        self._way = self._build("22m")

    def answer(self, order: str) -> Any:
        """Do what `order` names."""
        return {"time": self.time, "resident": self.resident, "live": self.live}[order]()

    def time(self) -> float:
        """Return the seconds of one step."""
        dist.barrier()
        started = time.perf_counter()
        self._way.step()
        dist.barrier()
        return time.perf_counter() - started

    def resident(self) -> dict[str, float]:
        """Return resident bytes per parameter: at most in a step, and after it."""
        _settle(self._way)
        begin_peak(CPU)
        self._way.step()
        peak = peak_since(self._base, CPU)
        between = begin_peak(CPU) - self._base
        return {"peak": peak / self._parameters, "between_steps": between / self._parameters}

    def live(self) -> dict[str, float]:
        """Return bytes per parameter of the tensors that are alive at once, at most."""
        live = memory.LiveStorages()
        with live:
            way = self._build("22m")
            _settle(way)
            live.peak = 0  # building may take more
            way.step(2)
        return {"live_tensors_peak": live.peak / self._parameters}


def _settle(way: Way) -> None:
    """Take the steps after which nothing new is allocated; DDP sorts its buckets in the second."""
    for _ in range(2):
        way.step(1)


def _warm_up() -> int:
    """Have the kernels for these shapes compiled, which stay in memory; count the parameters."""
    for autocast in (False, True):
        model = build_model(ModelConfig(size="22m"), VOCABULARY, LENGTH)
        model.to(torch.float32 if autocast else torch.bfloat16)
        tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = next_token_loss(model, {"inputs": tokens, "targets": tokens})[0]
        loss.backward()
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    if is_rank():
        return serve(lambda way, _: Rank(way).answer)
    arguments = _arguments()
    result = {
        "machine": machine(),
        "microbatches": MICROBATCHES,
        "tokens_per_microbatch": LENGTH,
        "memory": {way: _memory(way, 2, "resident", "live") for way in STEPS},
        "memory_with_adamw": {
            way: {ranks: _memory(way, ranks, "resident") for ranks in (2, 4)} for way in OPTIMIZERS
        },
        "references": {"autocast": DDP_AUTOCAST, "bf16": DDP_BF16},
        "seconds": _times(arguments.rounds),
    }
    kept = save("accumulation-step-cpu", result)
    print(figures.accumulation_step(result))
    print(f"kept in {kept}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each way")
    return parser.parse_args()


def _memory(way: str, ranks: int, *orders: str) -> dict[str, float]:
    """Return what the ranks answer to all orders, the largest number of each kind."""
    with Ranks("benchmarks.accumulation_step", way, ranks, memory.EXACT_MALLOC) as started:
        answers = [answer for order in orders for answer in started.ask(order)]
    names = dict.fromkeys(name for answer in answers for name in answer)
    return {name: max(answer.get(name, 0.0) for answer in answers) for name in names}


def _times(rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in STEPS}
    names = list(STEPS)
    with ExitStack() as stack:
        started = {
            way: stack.enter_context(Ranks("benchmarks.accumulation_step", way, 2)) for way in names
        }
        for way, counts in alternating(names, rounds, warm_up=1):
            taken = max(started[way].ask("time"))
            if counts:
                seconds[way].append(taken)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
