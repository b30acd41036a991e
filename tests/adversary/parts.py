"""Scripts that use one part of distmp in a custom training loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.buckets import Fp32GradBuckets
from distmp.scaling.grad_scaler import DistributedGradScaler
from tests.adversary.script import Case, Found, make_model, recorded_warnings, samples, sgd, summed

STEPS = 3
# Number of samples per rank and step; equal, so that the mean of means is the mean.
SAMPLES = 6

Line = Callable[[], object]


class PartScript:
    """A training loop as lines of code; a mistake removes, repeats or moves lines.

    Attributes:
        lines: Names of the lines of a step, in order.
        code: The function of each name.
        in_step: Lines that replace `lines` in single steps.
        truth_lines: Lines of the correct loop.
    """

    truth_lines: tuple[str, ...] = ("zero", "backward", "step")

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.random = random.Random(case.seed)
        self.world_size = case.world_size
        self.model: nn.Module = make_model("layernorm", case.seed)
        self.options: dict[str, Any] = {}
        self.lines: list[str] = []
        self.in_step: dict[int, list[str]] = {}
        self.code: dict[str, Line] = {}
        self.step = 0
        self.found = Found()
        self.compared = True
        self.truth_in_step: dict[int, tuple[str, ...]] = {}

    def build(self) -> None:
        """Build the objects that the loop uses."""

    def run(self) -> Found:
        with recorded_warnings(self.found.warnings):
            self.build()
            for self.step in range(STEPS):
                for line in self.in_step.get(self.step, self.lines):
                    self.code[line]()
            self._meet()
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        self.found.digest = repr({n: v.double().sum().item() for n, v in weights.items()})
        if self.compared:
            self.found.problems = self._differing(weights)
        return self.found

    def backward(self, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
        batch = samples(self.case.seed, self.step, self.rank, count=SAMPLES)
        loss, _ = summed(self.model, batch)
        scale(loss / SAMPLES).backward()

    def _meet(self) -> None:
        """Run a collective at the end, so that a rank detects a missing one."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))

    def _differing(self, weights: dict[str, Tensor]) -> list[str]:
        model = make_model("layernorm", self.case.seed).double()
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            for line in self.truth_in_step.get(step, self.truth_lines):
                if line == "backward":
                    self._true_backward(model, step)
                elif line == "step":
                    optimizer.step()
                elif line == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        moved = sum(float((p - start[n]).square().sum()) for n, p in model.named_parameters())
        apart = sum(float((p - weights[n]).square().sum()) for n, p in model.named_parameters())
        error = (apart / max(moved, 1e-12)) ** 0.5
        return [] if error < 2e-4 else [f"the weights are off by {error:.3g} of the update"]

    def _true_backward(self, model: nn.Module, step: int) -> None:
        for rank in range(self.world_size):
            batch = samples(self.case.seed, step, rank, count=SAMPLES)
            loss, _ = summed(model, batch._replace(inputs=batch.inputs.double()))
            (loss / SAMPLES / self.world_size).backward()


class ScalerScript(PartScript):
    """A loop with `DistributedGradScaler`; gradients are averaged like in DDP."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.options = {"init_scale": 2.0**10}
        self.device: Any = "cpu"
        self.lines = ["zero", "backward", "reduce", "step", "update"]
        self.build_optimizer: Callable[[Any], Any] = sgd
        self.code = {
            "zero": lambda: self.optimizer.zero_grad(),
            "backward": lambda: self.backward(lambda loss: self.scaler.scale(loss)),
            "backward without scale": self.backward,
            "reduce": self.reduce,
            "unscale": lambda: self.scaler.unscale_(self.optimizer),
            "clip": lambda: self.scaler.clip_grad_norm_(self.optimizer, 0.5),
            "clip as in torch": lambda: nn.utils.clip_grad_norm_(self.model.parameters(), 0.5),
            "step": lambda: self.scaler.step(self.optimizer),
            "step of the optimizer": lambda: self.optimizer.step(),
            "update": lambda: self.scaler.update(),
            "overflow": self.overflow,
        }

    def build(self) -> None:
        self.optimizer = self.build_optimizer(self.model.parameters())
        self.scaler = DistributedGradScaler(self.device, **self.options)

    def reduce(self) -> None:
        if self.world_size > 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.world_size

    def overflow(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(float("inf"))


class BucketsScript(PartScript):
    """A loop with `Fp32GradBuckets` and a plain optimizer."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.lines = ["begin", "first", "backward", "end", "last", "backward", "end", "finish"]
        self.lines += ["step"]
        self.truth_lines = ("backward", "backward", "step")
        self.named: Callable[[], Any] = lambda: list(self.model.named_parameters())
        self.group: Callable[[], Any] = lambda: dist.group.WORLD if self.world_size > 1 else None
        self.code = {
            "begin": lambda: self.buckets.begin_step(),
            "first": lambda: self.buckets.begin_microbatch(last=False),
            "last": lambda: self.buckets.begin_microbatch(last=True),
            "backward": lambda: self.backward(lambda loss: loss / self.world_size),
            "end": lambda: self.buckets.end_microbatch(),
            "finish": lambda: self.buckets.finish(),
            "discard": lambda: self.buckets.discard(),
            "step": lambda: self.optimizer.step(),
            "zero": lambda: self.optimizer.zero_grad(),
        }

    def build(self) -> None:
        self.buckets = Fp32GradBuckets(self.named(), self.group(), **self.options)
        self.optimizer = sgd(self.model.parameters())


class CallScript:
    """One call of a function or a class."""

    def __init__(self, case: Case, rank: int) -> None:
        self.found = Found()
        self.call: Callable[[], object] = lambda: None

    def run(self) -> Found:
        self.call()
        return self.found
