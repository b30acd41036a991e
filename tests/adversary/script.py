"""A training script like a user's, and the reference results of correct use.

A mistake (`tests.adversary.mistakes`) changes parts of the script. If the changed script is still
valid, the mistake changes the reference in the same way.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from distmp.engine.engine import Engine
from distmp.engine.outcome import StepNumbers
from distmp.parallel import ParallelConfig
from distmp.scaling.settings import LossScaleConfig
from tests.reference import gathered

INPUTS, WIDTH, CLASSES = 6, 8, 4
STEPS, MICROBATCHES = 3, 2

SHARDED = ("fsdp", "hsdp")
WHOLE = ("ddp",)
STRATEGIES = (*WHOLE, *SHARDED)
POLICIES = ("fp32", "bf16", "bf16-autocast", "bf16-pure", "fp16", "fp16-autocast", "fp16-static")
# Relative tolerances of update, loss and gradient norm; the model and its steps are small.
TOLERANCES = {
    "fp32": 2e-4,
    "bf16": 0.1,
    "bf16-autocast": 0.1,
    "bf16-pure": 0.4,
    "fp16": 0.02,
    "fp16-autocast": 0.02,
    "fp16-static": 0.02,
}
# Further settings; a case has at most one of them.
EXTRAS = (
    "",
    "max_norm",
    "schedule",
    "shard_optimizer",
    "reproducible",
    "drop_microbatch",
    "no first_step_checks",
    "no attribution",
)

Loss = Callable[[nn.Module, Any], Any]
Act = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A script and its mistakes, as JSON-compatible values."""

    mistakes: tuple[str, ...]
    world_size: int = 1
    strategy: str = "auto"
    policy: str = "fp32"
    optimizer: str = "sgd"
    model: str = "layernorm"
    extra: str = ""
    seed: int = 0

    @property
    def sharded(self) -> bool:
        return self.strategy in SHARDED

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.policy]

    def as_mapping(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Case:
        return cls(**{**values, "mistakes": tuple(values["mistakes"])})


class Net(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm == "batchnorm" else nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def make_model(norm: str, seed: int) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(norm)


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


def samples(*place: int, count: int) -> Pair:
    """Return the samples of an index, such as (seed, step, rank, microbatch)."""
    generator = torch.Generator().manual_seed(hash(place) % 2**31)
    inputs = torch.randn(count, INPUTS, generator=generator)
    return Pair(inputs, torch.randint(CLASSES, (count,), generator=generator))


def summed(module: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Return the summed cross entropy and, as weight, the number of samples."""
    inputs, labels = batch
    return F.cross_entropy(module(inputs), labels, reduction="sum"), len(labels)


def sgd(named: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(named: Any, **options: Any) -> torch.optim.Optimizer:
    # A large epsilon, so that the update is a smooth function of the gradient.
    return torch.optim.AdamW(named, **{"lr": 0.05, "eps": 0.1, "weight_decay": 0.01, **options})


def fused_sgd(named: Any) -> torch.optim.Optimizer:
    return sgd(named, fused=True)


def fused_adamw(named: Any) -> torch.optim.Optimizer:
    return adamw(named, fused=True)


# For each optimizer, the function of the script and that of the reference.
OPTIMIZERS = {
    "sgd": (sgd, sgd),
    "adamw": (adamw, adamw),
    "fused sgd": (fused_sgd, sgd),
    "fused adamw": (fused_adamw, adamw),
}


def halving(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)


class Acts:
    """Additional actions at points of a script, such as "before 1"."""

    def __init__(self) -> None:
        self._acts: dict[str, list[Act]] = defaultdict(list)

    def on(self, place: str, act: Act) -> None:
        self._acts[place].append(act)

    def at(self, place: str) -> None:
        for act in self._acts[place]:
            act()


class Truth(Acts):
    """The same training in float64 in one process, with a plain torch loop.

    Attributes:
        batches: Microbatches by step, then rank.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model: nn.Module = make_model(case.model, case.seed).double()
        self.loss: Loss = summed
        self.build = OPTIMIZERS[case.optimizer][1]
        self.batches = [
            [batches_of(case, step, rank) for rank in range(case.world_size)]
            for step in range(STEPS)
        ]
        self.evaluated = [evaluated_by(case, rank) for rank in range(case.world_size)]
        self.max_norm = 0.5 if case.extra == "max_norm" else None
        self.schedule = halving if case.extra == "schedule" else None
        # The buffers are then those after the first microbatch of the global batch.
        self.reproducible = case.extra == "reproducible"
        self.numbers: list[StepTruth] = []

    def run(self) -> None:
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer = self.build(list(self.model.named_parameters()))
        scheduler = self.schedule(self.optimizer) if self.schedule else None
        self.at("built")
        for step in range(len(self.batches)):
            self.at(f"before {step}")
            self.numbers.append(self.take_step(self.batches[step]))
            if scheduler is not None and not self.numbers[-1].skipped:
                scheduler.step()
            self.at(f"after {step}")
        self.at("end")

    def take_step(self, batches_of_ranks: Sequence[Sequence[Any]]) -> StepTruth:
        before = copy.deepcopy(dict(self.model.named_buffers()))
        after: dict[str, Tensor] = {}
        loss_sum, weight_sum = 0.0, 0.0
        self.optimizer.zero_grad()
        for rank, batches in enumerate(batches_of_ranks):
            self._set_buffers(before)
            for batch in batches:
                loss, weight = self.loss(self.model, _double(batch))
                loss.backward()
                loss_sum, weight_sum = loss_sum + float(loss), weight_sum + float(weight)
                if rank == 0 and not (after and self.reproducible):
                    after = copy.deepcopy(dict(self.model.named_buffers()))
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, weight_sum)
        norm = float(nn.utils.get_total_norm(gradients))
        skipped = not (torch.isfinite(torch.tensor([norm, weight_sum])).all() and weight_sum > 0)
        self._set_buffers(before if skipped else after)
        if not skipped:
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
        loss_mean = loss_sum / weight_sum if weight_sum else float("nan")
        return StepTruth(loss_mean, weight_sum, norm, skipped)

    @torch.no_grad()
    def evaluate(self, batches_of_ranks: Sequence[Sequence[Any]]) -> float:
        training = [part for part in self.model.modules() if part.training]
        self.model.eval()
        pairs = [
            self.loss(self.model, _double(batch))
            for batches in batches_of_ranks
            for batch in batches
        ]
        for part in training:
            part.training = True
        weight = float(sum(weight for _, weight in pairs))
        return float(sum(loss for loss, _ in pairs)) / weight if weight else float("nan")

    def _set_buffers(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])


class StepTruth(NamedTuple):
    loss: float
    weight: float
    grad_norm: float
    skipped: bool


@dataclass
class Found:
    """The results of a script, except for an error.

    Attributes:
        numbers: The numbers of each step.
        problems: Differences from the reference.
        digest: Digest of all values that have to be equal on all ranks.
        warnings: The warnings of distmp.
    """

    numbers: list[dict[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    digest: str = ""
    warnings: list[str] = field(default_factory=list)


class Script(Acts):
    """The script of one rank. Attributes may be changed before `run`, or by an action during it.

    Attributes:
        random: Random generator with the same seed on every rank.
        batches: Microbatches of this rank by step.
        compared: Whether the reference results are known.
        on_step_error: Called with an error of `Engine.step`.
    """

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self.case = case
        self.rank = rank
        self.random = random.Random(case.seed)
        self.model: Any = make_model(case.model, case.seed)
        self.loss: Any = summed
        self.optimizer: Any = OPTIMIZERS[case.optimizer][0]
        self.options: dict[str, Any] = {"policy": case.policy, "strategy": case.strategy}
        self.options |= _extra_options(case)
        self.batches: list[Any] = [batches_of(case, step, rank) for step in range(STEPS)]
        self.evaluated: Any = evaluated_by(case, rank)
        self.truth = Truth(case)
        self.compared = True
        self.found = Found()
        self.outcomes: list[Any] = []

    @property
    def several(self) -> bool:
        return self.case.world_size > 1

    def run(self) -> Found:
        with recorded_warnings(self.found.warnings):
            self.engine = Engine(self.model, self.loss, self.optimizer, **self.options)
            self.at("built")
            for step in range(len(self.batches)):
                self.at(f"before {step}")
                self.take_step(self.batches[step])
                self.at(f"after {step}")
            self.at("end")
            mean = self.engine.evaluate(self.evaluated)
        self._compare(mean)
        return self.found

    def take_step(self, batches: Any) -> None:
        outcome = self.engine.step(batches)
        self.outcomes.append(outcome)
        self.found.numbers.append(outcome.numbers._asdict())

    def _compare(self, mean: float) -> None:
        state = self.engine.state_dict()
        weights = gathered(
            {
                name.removeprefix("model/"): value
                for name, value in state.items()
                if name.startswith("model/")
            }
        )
        seen = {**weights, "mean": torch.tensor(mean), "numbers": repr(self.found.numbers)}
        if (
            not self.case.sharded
        ):  # the parameters of the module, in addition to the optimizer's weights
            seen |= {
                f"held/{name}": value.detach()
                for name, value in self.engine.module.state_dict().items()
            }
        self.found.digest = _digest(seen)
        if self.compared:
            self.truth.run()
            expected_mean = self.truth.evaluate(self.truth.evaluated)
            self.found.problems = [
                *_differing_numbers(self.found.numbers, self.truth.numbers, self.case.tolerance),
                *self._differing_weights(weights),
            ]
            if not close(mean, expected_mean, self.case.tolerance):
                self.found.problems.append(f"evaluate gives {mean:.6g}, not {expected_mean:.6g}")

    def _differing_weights(self, weights: dict[str, Tensor]) -> list[str]:
        problems = []
        moved, apart = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for name, expected in self.truth.model.named_parameters():
            if name not in weights or weights[name].shape != expected.shape:
                problems.append(f"{name} is missing")
                continue
            start = self.truth.start.get(name, torch.zeros_like(expected))
            moved += (expected.detach() - start).square().sum()
            # Each step of `bf16-pure` rounds the weights, and loses a smaller update.
            rounding = (STEPS + 1) * 2.0**-9 if self.case.policy == "bf16-pure" else 0.0
            error = (expected.detach() - weights[name].double()).abs()
            apart += (error - rounding * expected.detach().abs()).clamp(min=0).square().sum()
        # If no weight should change, none may.
        share = float((apart / moved.clamp(min=1e-12)).sqrt())
        if not share < self.case.tolerance:
            problems.append(f"the weights are off by {share:.3g} of the update")
        return problems


def batches_of(case: Case, step: int, rank: int) -> list[Any]:
    """Return the microbatches of a rank, of different sizes."""
    return [
        samples(case.seed, step, rank, index, count=4 + (step + 3 * rank + 2 * index) % 5)
        for index in range(MICROBATCHES)
    ]


def evaluated_by(case: Case, rank: int) -> list[Any]:
    return [samples(case.seed, 99, rank, 0, count=4)]


def close(found: float, expected: float, tolerance: float) -> bool:
    if found != found or expected != expected:
        return found != found and expected != expected
    return found == expected or abs(found - expected) <= tolerance * max(abs(expected), 1e-3)


class recorded_warnings:  # noqa: N801  # a context manager that reads as one
    """Collect the log messages of distmp, and Python's warnings."""

    def __init__(self, found: list[str]) -> None:
        self._found = found
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
        self._catch = warnings.catch_warnings(record=True)

    def __enter__(self) -> None:
        logging.getLogger("distmp").addHandler(self._handler)
        self._caught = self._catch.__enter__()
        warnings.simplefilter("always")

    def __exit__(self, *error: object) -> None:
        logging.getLogger("distmp").removeHandler(self._handler)
        self._catch.__exit__(*error)
        self._found += [str(warning.message) for warning in self._caught or ()]


def _extra_options(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if case.policy in ("fp16", "fp16-autocast"):
        options["loss_scale"] = LossScaleConfig(init=2.0**8)
    extra: dict[str, dict[str, Any]] = {
        "max_norm": {"max_norm": 0.5},
        "schedule": {"schedule": halving},
        "shard_optimizer": {"shard_optimizer": True},
        "reproducible": {"reproducible": True},
        "drop_microbatch": {"on_nonfinite": "drop_microbatch"},
        "no first_step_checks": {"first_step_checks": False},
        "no attribution": {"attribution": False},
        "recompute": {"parallel": ParallelConfig(activation_checkpointing="blocks")},
    }
    return options | extra.get(case.extra, {})


def _double(batch: Any) -> Any:
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, batch
    )


def _differing_numbers(
    found: Sequence[Mapping[str, float]], expected: Sequence[StepTruth], tolerance: float
) -> list[str]:
    if len(found) != len(expected):
        return [f"{len(found)} steps instead of {len(expected)}"]
    problems = []
    for step, (one, truth) in enumerate(zip(found, expected, strict=True)):
        for name, value in truth._asdict().items():
            exact = name in ("weight", "skipped")
            if truth.skipped and name in ("loss", "grad_norm"):
                continue
            if not close(one[name], value, 0 if exact else tolerance):
                problems.append(f"step {step}: {name} is {one[name]:.6g}, not {value:.6g}")
    return problems


def _digest(values: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        if isinstance(value, Tensor):
            value = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest.update(name.encode() + (value if isinstance(value, bytes) else str(value).encode()))
    return digest.hexdigest()


__all__ = ["Case", "Found", "Script", "StepNumbers", "Truth"]
