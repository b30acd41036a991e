"""Unusual models on two ranks, compared with a plain loop on one rank in float64."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distmp.engine.engine import Engine
from tests.ranks import ranks
from tests.reference import assert_same_bits, gathered, snapshot
from tests.torchrun import python, run

WIDTH, CLASSES = 8, 5
STEPS = 4
WAYS: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp"},
    {"strategy": "ddp", "shard_optimizer": True},
    {"strategy": "ddp", "on_nonfinite": "drop_microbatch"},
)


class Sample:
    """A microbatch, and options for the model."""

    def __init__(self, step: int, rank: int, index: int, size: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
        self.step, self.rank, self.index = step, rank, index
        self.inputs = torch.randn(size, WIDTH, generator=generator)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)


SIZES = ((3, 5), (6, 0))
"""Number of samples of each microbatch by rank; one is empty."""


def loss(model: nn.Module, sample: Sample) -> tuple[Tensor, int]:
    dtype = torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
    logits = model(sample.inputs.to(dtype), sample)
    return F.cross_entropy(logits, sample.labels, reduction="sum"), len(sample.labels)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3, fused=True)


class Base(nn.Module):
    """A few layers; subclasses define `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, sample: Sample) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.choose(sample):
            x = torch.tanh(block(x)) + x
        return self.head(x)

    def choose(self, sample: Sample) -> Sequence[nn.Module]:
        return list(self.blocks)


class UsedManyTimes(Base):
    def choose(self, sample: Sample) -> Sequence[nn.Module]:
        return [self.blocks[0]] * 5


class TiedWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight
        self.first.weight = self.blocks[0].weight


class UsedOnOneRank(Base):
    def choose(self, sample: Sample) -> Sequence[nn.Module]:
        return [self.blocks[0], self.blocks[1 + sample.rank]]


class UsedInOneMicrobatch(Base):
    def choose(self, sample: Sample) -> Sequence[nn.Module]:
        return [self.blocks[0], self.blocks[1 + sample.index]]


class NeverUsed(Base):
    def choose(self, sample: Sample) -> Sequence[nn.Module]:
        return [self.blocks[0], self.blocks[2]]


class UsedLater(Base):
    """Uses its other blocks from the third step on."""

    def choose(self, sample: Sample) -> Sequence[nn.Module]:
        return list(self.blocks) if sample.step >= 2 else [self.blocks[0]]


class Checkpointed(Base):
    def forward(self, x: Tensor, sample: Sample) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(lambda y, part: torch.tanh(part(y)) + y, x, block, use_reentrant=False)
        return self.head(x)


class PartlyFrozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.blocks[1].bias.requires_grad_(False)


class FrozenForAWhile(Base):
    def before(self, step: int) -> None:
        self.blocks[1].requires_grad_(step not in (1, 2))


class Compiled(Base):
    """Compiles each block separately."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


MODELS = (
    Base,
    UsedManyTimes,
    TiedWeights,
    UsedOnOneRank,
    UsedInOneMicrobatch,
    NeverUsed,
    UsedLater,
    Checkpointed,
    PartlyFrozen,
    FrozenForAWhile,
)


def samples(step: int, rank: int) -> list[Sample]:
    return [Sample(step, rank, index, size) for index, size in enumerate(SIZES[rank])]


def plain(kind: Callable[[], Base], optimizer: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Train in float64 on all samples with a plain torch loop."""
    model = kind().double()
    stepper = optimizer(list(model.parameters()))
    for step in range(STEPS):
        if hasattr(model, "before"):
            model.before(step)
        stepper.zero_grad()
        everything = [loss(model, one) for rank in range(2) for one in samples(step, rank)]
        total = sum(weight for _, weight in everything)
        sum(value for value, _ in everything).div(total).backward()  # type: ignore[union-attr]
        stepper.step()
    return dict(model.named_parameters())


def trained(
    kind: Callable[[], Base], optimizer: Callable[[Any], Any], options: dict[str, Any]
) -> dict[str, Tensor]:
    model = kind()
    engine = Engine(model, loss, optimizer, **{"policy": "fp32", **options}, device="cpu")
    for step in range(STEPS):
        if hasattr(model, "before"):
            model.before(step)
        engine.step(samples(step, engine.world.rank))
    state = {k: v for k, v in engine.state_dict().items() if k.startswith("model/")}
    return gathered({name.removeprefix("model/"): value for name, value in state.items()})


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() >= expected.keys()
    apart = torch.cat([(found[k].double() - expected[k]).flatten() for k in expected])
    start = dict(Base().named_parameters())
    moved = torch.cat([(expected[k] - start[k].double()).flatten() for k in expected])
    return float((apart.norm() / moved.norm()).detach())


@ranks(2)
def test_every_model_equals_plain_torch() -> None:
    for kind in MODELS:
        for optimizer in (sgd, adamw):
            expected = plain(kind, optimizer)
            for options in WAYS:
                found = trained(kind, optimizer, options)
                assert distance(found, expected) < 2e-5, (kind, optimizer, options)


@pytest.mark.nightly
@ranks(2)
def test_16_bit_parameters_are_close_to_plain_torch() -> None:
    for kind in MODELS:
        expected = plain(kind, sgd)
        for options in WAYS:
            found = trained(kind, sgd, {"policy": "bf16", **options})
            assert distance(found, expected) < 0.05, (kind, options)


@ranks(2)
def test_16_bit_communication_is_close_to_plain_torch() -> None:
    from dataclasses import replace

    from distmp.precision import policy

    expected = plain(Base, sgd)
    for options in WAYS[:3]:
        low_precision = replace(policy("fp32"), name="fp32-wire-bf16", reduce_dtype=torch.bfloat16)
        assert distance(trained(Base, sgd, {"policy": low_precision, **options}), expected) < 0.01


# torch.compile


@pytest.mark.nightly
@ranks(2)
def test_compiled_blocks_and_compiled_models() -> None:
    expected = plain(Base, sgd)
    assert distance(trained(Compiled, sgd, WAYS[0]), expected) < 2e-5

    def compiled_whole() -> Any:
        return torch.compile(Base(), backend="aot_eager")

    class Records(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    messages: list[str] = []
    logging.getLogger("distmp").addHandler(Records())
    # Names are those of the model, without the prefix of torch.compile.
    assert distance(trained(compiled_whole, sgd, WAYS[0]), expected) < 2e-5
    warned = any("compile its blocks" in message for message in messages)
    assert warned == (dist.get_rank() == 0)


# A step that fails


def raise_in_backward(gradient: Tensor) -> None:
    raise ArithmeticError("this rank cannot continue")


@ranks(2)
def test_failed_step_leaves_no_state() -> None:
    for options in (*WAYS, {"strategy": "ddp", "reproducible": True}):
        engines = [
            Engine(Base(), loss, sgd, **options, policy="fp32", device="cpu") for _ in range(2)
        ]
        torch.use_deterministic_algorithms(False)
        hook = engines[0]._setup.strategy.module.first.weight.register_hook(raise_in_backward)
        with pytest.raises(ArithmeticError):
            engines[0].step(samples(0, dist.get_rank()))
        hook.remove()
        for step in range(2):
            numbers = [engine.step(samples(step, dist.get_rank())).numbers for engine in engines]
            assert numbers[0] == numbers[1]
        assert_same_bits(snapshot(engines[0]), snapshot(engines[1]))


SCRIPT = """
import torch.distributed as dist

import distmp
from tests.parallel.test_what_models_do import Base, loss, raise_in_backward, samples, sgd

dist.init_process_group("gloo")
model = Base()
engine = distmp.Engine(model, loss, sgd, policy="fp32", strategy="ddp", device="cpu")
if dist.get_rank() == 1:
    model.first.weight.register_hook(raise_in_backward)
engine.step(samples(0, dist.get_rank()))
"""


@pytest.mark.nightly
def test_error_in_backward_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = run(python(*launcher, str(script)), tmp_path)
    assert ended.returncode != 0
    assert "ArithmeticError: this rank cannot continue" in ended.stderr
