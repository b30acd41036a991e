from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distmp.commands.calibrate.loss_scale import GradientRecorder
from distmp.diagnosis.histogram import ExponentHistogram
from distmp.engine import Engine
from tests.ranks import ranks
from tests.reference import (
    ONE_RANK,
    TWO_RANKS,
    Classifier,
    assert_same_bits,
    loss,
    make_engine,
    make_model,
    microbatches,
    snapshot,
    train,
)

CPU = torch.device("cpu")


def exponents_of(gradients: list[Tensor]) -> dict[int, int]:
    """Count exponents with numpy."""
    values = np.concatenate([gradient.numpy().ravel() for gradient in gradients])
    exponents, counts = np.unique(np.frexp(values[values != 0])[1] - 1, return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def recorded(engine: Engine, sizes: object = TWO_RANKS, steps: int = 2) -> ExponentHistogram:
    with GradientRecorder(engine.module, CPU) as recorder:
        train(engine, steps, sizes)  # type: ignore[arg-type]
    return recorder.histogram(engine.world.group)


def outputs_of(model: Classifier, x: Tensor) -> list[Tensor]:
    """Run the model and return the outputs of its modules."""
    kept = [model.first(x)]
    x = kept[0]
    for block in model.blocks:
        norm = block.norm(x)
        linear = block.linear(norm)
        x = x + torch.tanh(linear)
        kept += [norm, linear, x]
    return [*kept, model.head(x)]


def test_counts_are_those_of_autograd_for_each_microbatch() -> None:
    engine = make_engine()
    histogram = recorded(engine, ONE_RANK, steps=1)
    assert engine.nominal_weight is not None
    model = make_model()
    found: list[Tensor] = []
    for batch in microbatches(0, ONE_RANK[0]):
        outputs = outputs_of(model, batch.inputs)
        total = nn.functional.cross_entropy(outputs[-1], batch.labels, reduction="sum")
        wanted = [*outputs, *model.parameters()]
        found += torch.autograd.grad(total / engine.nominal_weight, wanted)
    assert dict(histogram.exponents) == exponents_of(found)


@ranks(2, timeout=110)
def test_strategies_agree() -> None:
    of_ddp, of_fsdp = (recorded(make_engine(strategy=strategy)) for strategy in ("ddp", "fsdp"))
    assert of_ddp.exponents == of_fsdp.exponents


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_recording_changes_nothing_and_leaves_nothing(policy: str) -> None:
    watched, other = make_engine(policy=policy), make_engine(policy=policy)
    hooks = _hooks(watched.module)
    recorded(watched, ONE_RANK)
    assert _hooks(watched.module) == hooks
    train(other, 2, ONE_RANK)
    assert_same_bits(snapshot(watched), snapshot(other))


def _hooks(module: nn.Module) -> list[int]:
    holders = [*module.modules(), *module.parameters()]
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    return [len(getattr(holder, name, None) or ()) for holder in holders for name in names]


class _Awkward(nn.Module):
    """Has a shared weight, a module called twice, recomputation, tuples, a detached output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.twice = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.twice.weight
        self.pair = _Pair()
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.twice, x * self.scale, use_reentrant=False)
        x = self.tied(self.twice(x))
        first, number = self.pair(x)
        return first + number


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu_().exp(), torch.arange(3.0)


def test_each_gradient_counts_once() -> None:
    model = _Awkward()
    with GradientRecorder(model, CPU) as recorder:
        model(torch.randn(5, 3)).sum().backward()
    # One gradient of the weight that is used three times, and of each output.
    assert recorder.histogram(None).values == 3 + 9 + 15 * (1 + 2 + 1 + 1)


def test_a_larger_loss_moves_the_recommendation() -> None:
    scales = []
    for factor in (1.0, 2.0**10):
        engine = make_engine()
        with GradientRecorder(engine.module, CPU) as recorder:
            batches = [batch._replace(factor=factor) for batch in microbatches(0, ONE_RANK[0])]
            engine.step(batches)
        scales.append(2.0 ** (12 - max(recorder.histogram(None).exponents)))
    assert scales[0] == scales[1] * 2.0**10
    assert loss(make_model(), batches[0])[0] > 1000
