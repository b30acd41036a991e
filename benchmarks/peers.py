"""Whole training steps beside what people use instead: `python -m benchmarks.peers`.

The same transformer, batch, optimizer (fused AdamW), clipping and seed for every loop: torch's DDP
and FSDP2 by hand, accelerate, Lightning Fabric and distmp. Each loop has ranks of its own, and they
take turns, a step each; memory is measured in processes of its own. On CPUs two ranks over gloo and
22 M parameters; `--device cuda --size 350m` for one GPU. Fabric takes part if it is installed, as
the extra `peers` does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import figures, memory
from benchmarks.ranks import Ranks, is_rank, serve
from benchmarks.report import alternating, machine, save
from distmp import DistributedGradScaler, Engine
from distmp.models.build import build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.parallel.blocks import find_blocks
from distmp.telemetry.memory import begin_peak, peak_since

MICROBATCHES, SAMPLES, LENGTH, VOCABULARY = 4, 2, 128, 258
RATE, MAX_NORM = 1e-4, 1.0
BF16, FP16 = torch.bfloat16, torch.float16

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Loop(ABC):
    """A model that trains on the same microbatches in every step."""

    def __init__(self, size: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        with device:
            self.model = build_model(ModelConfig(size=size), VOCABULARY, LENGTH)
            tokens = torch.randint(VOCABULARY, (MICROBATCHES, SAMPLES, LENGTH + 1))
        self.batches = [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in tokens]

    @abstractmethod
    def step(self) -> None:
        """Train on all microbatches: forward, backward, clip, update."""

    def adamw(self) -> torch.optim.Optimizer:
        """Return the optimizer, on the parameters as they are now."""
        return torch.optim.AdamW(self.model.parameters(), RATE, fused=True)


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss whose gradients add up to that of the mean over microbatches."""
    return next_token_loss(model, batch)[0] / (SAMPLES * LENGTH * MICROBATCHES)


class TorchDDP(Loop):
    """DDP, autocast and GradScaler, as torch's documentation has them."""

    def __init__(self, size: str, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__(size, device)
        self._dtype = dtype
        self._ddp = DistributedDataParallel(self.model)
        self._optimizer = self.adamw()
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == FP16)

    def step(self) -> None:
        for index, batch in enumerate(self.batches):
            self._ddp.require_backward_grad_sync = index == MICROBATCHES - 1
            with torch.autocast(self.device.type, self._dtype, enabled=self._dtype is not None):
                loss = mean_loss(self._ddp, batch)
            self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()


class Fsdp2(Loop):
    """FSDP2 per block, by hand, reduced in FP32 in the last microbatch."""

    def __init__(self, size: str, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__(size, device)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in find_blocks(self.model).values():
            fully_shard(block, mp_policy=policy)
        self._sharded = fully_shard(self.model, mp_policy=policy)
        self._optimizer = self.adamw()

    def step(self) -> None:
        for index, batch in enumerate(self.batches):
            self._sharded.set_requires_gradient_sync(index == MICROBATCHES - 1)
            mean_loss(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Accelerate(Loop):
    """accelerate's loop with `accumulate`, DDP."""

    def __init__(self, size: str, device: torch.device, dtype: torch.dtype | None) -> None:
        from accelerate import Accelerator

        super().__init__(size, device)
        words = {None: "no", BF16: "bf16", FP16: "fp16"}
        self._accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=words[dtype],
            gradient_accumulation_steps=MICROBATCHES,
        )
        self._prepared, self._optimizer = self._accelerator.prepare(self.model, self.adamw())

    def step(self) -> None:
        for batch in self.batches:
            with self._accelerator.accumulate(self._prepared):
                # accelerate divides by the number of microbatches itself.
                loss = MICROBATCHES * mean_loss(self._prepared, batch)
                self._accelerator.backward(loss)
                if self._accelerator.sync_gradients:
                    self._accelerator.clip_grad_norm_(self._prepared.parameters(), MAX_NORM)
                self._optimizer.step()
                self._optimizer.zero_grad()


class Fabric(Loop):
    """Lightning Fabric's loop, DDP."""

    def __init__(self, size: str, device: torch.device, dtype: torch.dtype | None) -> None:
        from lightning_fabric import Fabric as LightningFabric
        from lightning_fabric.plugins.environments import LightningEnvironment
        from lightning_fabric.strategies import DDPStrategy

        super().__init__(size, device)
        words: dict[torch.dtype | None, Any] = {
            None: "32-true",
            BF16: "bf16-mixed",
            FP16: "16-mixed",
        }
        ranks = dist.get_world_size()
        os.environ.update(
            LOCAL_RANK=str(dist.get_rank()), NODE_RANK="0", WORLD_SIZE=str(ranks)
        )  # how Fabric is told that its processes have been started
        self._fabric = LightningFabric(
            accelerator=device.type,
            devices=ranks,
            strategy=DDPStrategy(cluster_environment=LightningEnvironment()),
            precision=words[dtype],
        )
        self._fabric.launch()
        self._prepared, self._optimizer = self._fabric.setup(self.model, self.adamw())

    def step(self) -> None:
        for index, batch in enumerate(self.batches):
            inside = index < MICROBATCHES - 1
            with self._fabric.no_backward_sync(self._prepared, enabled=inside):
                self._fabric.backward(mean_loss(self._prepared, batch))
        self._fabric.clip_gradients(self._prepared, self._optimizer, max_norm=MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


class TorchWithScaler(TorchDDP):
    """torch's DDP loop with distmp's scaler in the place of torch's."""

    def __init__(self, size: str, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__(size, device, dtype)
        self._scaler = DistributedGradScaler(
            device.type, enabled=dtype == FP16, optimizers=[self._optimizer]
        )


class Distmp(Loop):
    """distmp's engine."""

    def __init__(self, size: str, device: torch.device, policy: str, strategy: str) -> None:
        super().__init__(size, device)
        self._engine = Engine(
            self.model,
            next_token_loss,
            lambda named: torch.optim.AdamW(named, RATE, fused=True),
            policy=policy,
            strategy=strategy,
            max_norm=MAX_NORM,
            device=device,
        )

    def step(self) -> None:
        self._engine.step(self.batches)


Make = Callable[[str, torch.device], Loop]


def _by_hand(kind: Callable[..., Loop], dtype: torch.dtype | None) -> Make:
    return lambda size, device: kind(size, device, dtype)


def _distmp(policy: str, strategy: str) -> Make:
    return lambda size, device: Distmp(size, device, policy, strategy)


def _replicated(dtype: torch.dtype | None, policies: tuple[str, ...]) -> dict[str, Make]:
    found = {"torch DDP": _by_hand(TorchDDP, dtype), "accelerate": _by_hand(Accelerate, dtype)}
    if find_spec("lightning_fabric"):
        found["Lightning Fabric"] = _by_hand(Fabric, dtype)
    return found | {f"distmp `{policy}`": _distmp(policy, "ddp") for policy in policies}


# The loops that are compared with each other; the first of each is what ratios refer to.
RACES: dict[str, dict[str, Make]] = {
    "ddp fp32": _replicated(None, ("fp32",)),
    "ddp bf16": _replicated(BF16, ("bf16-autocast", "bf16")),
    "ddp fp16": {
        **_replicated(FP16, ("fp16-autocast", "fp16")),
        "torch DDP, distmp's scaler": _by_hand(TorchWithScaler, FP16),
    },
    "fsdp fp32": {
        "FSDP2 by hand": _by_hand(Fsdp2, None),
        "distmp `fp32`": _distmp("fp32", "fsdp"),
    },
    "fsdp bf16": {
        "FSDP2 by hand": _by_hand(Fsdp2, BF16),
        "distmp `bf16`": _distmp("bf16", "fsdp"),
    },
}
# float16 is only emulated on CPUs, and accelerate runs float32 there instead, without a word.
SLOW_ON_CPU = ("ddp fp16",)


class Rank:
    """What one rank of a loop answers to the orders of the main process."""

    def __init__(self, way: str) -> None:
        race, name, size, device = way.split("|")
        self._device = torch.device(device)
        # Kernels are made, and libraries loaded, for good.
        RACES[race][name]("1m", self._device).step()
        self._base = begin_peak(self._device)
        self._loop = RACES[race][name](size, self._device)
        self._parameters = sum(p.numel() for p in self._loop.model.parameters())

    def answer(self, order: str) -> float:
        """Do what `order` names."""
        return {"time": self.time, "memory": self.memory}[order]()

    def time(self) -> float:
        """Return the seconds of one step."""
        self._wait()
        started = time.perf_counter()
        self._loop.step()
        self._wait()
        return time.perf_counter() - started

    def memory(self) -> float:
        """Return the most bytes in use in a step that is not the first."""
        self._loop.step()
        begin_peak(self._device)
        self._loop.step()
        return peak_since(self._base, self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def main() -> int:
    if is_rank():
        return serve(lambda way, _: Rank(way).answer)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="22m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--races", nargs="*", choices=RACES)
    arguments = parser.parse_args()
    names = arguments.races or [
        race for race in RACES if arguments.device != "cpu" or race not in SLOW_ON_CPU
    ]
    races = {}
    for race in names:
        races[race] = _run(race, arguments)
        print(figures.race(race, races[race], _tokens(arguments.ranks)), flush=True)
    result = {
        "machine": machine(),
        "size": arguments.size,
        "ranks": arguments.ranks,
        "tokens": _tokens(arguments.ranks),
        "races": races,
    }
    print(f"kept in {save(f'peers-{arguments.device}', result)}")
    return 0


def _tokens(ranks: int) -> int:
    return ranks * MICROBATCHES * SAMPLES * LENGTH


def _run(race: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    def started(name: str, environment: dict[str, str] | None = None) -> Ranks:
        way = "|".join([race, name, arguments.size, arguments.device])
        return Ranks("benchmarks.peers", way, arguments.ranks, environment)

    names = list(RACES[race])
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in names}
    for name in names:
        with started(name, memory.EXACT_MALLOC) as ranks:
            found[name]["memory"] = max(ranks.ask("memory"))
    with ExitStack() as stack:
        alive = {name: stack.enter_context(started(name)) for name in names}
        for name, counts in alternating(names, arguments.rounds, warm_up=1):
            seconds = max(alive[name].ask("time"))
            if counts:
                found[name]["seconds"].append(seconds)
    return found


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
