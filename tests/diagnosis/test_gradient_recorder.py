from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distmp.diagnosis.gradient_recorder import (
    ACTIVATIONS,
    PARAMETERS,
    GradientRecorder,
    Histograms,
    group_of,
)
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


def exponents(histograms: Histograms) -> dict[str, dict[str, dict[int, int]]]:
    return {
        kind: {name: dict(histogram.exponents) for name, histogram in of_kind.items()}
        for kind, of_kind in histograms.items()
    }


def recorded(engine: Engine, sizes: object = TWO_RANKS, steps: int = 2) -> Histograms:
    with GradientRecorder(engine.module, CPU) as recorder:
        train(engine, steps, sizes)  # type: ignore[arg-type]
    return recorder.histograms(engine.world.group)


def outputs_of(model: Classifier, x: Tensor) -> dict[str, list[Tensor]]:
    """Run the model and keep the outputs of its modules."""
    kept: dict[str, list[Tensor]] = {"first": [model.first(x)]}
    x = kept["first"][0]
    for index, block in enumerate(model.blocks):
        norm = block.norm(x)
        linear = block.linear(norm)
        x = x + torch.tanh(linear)
        kept[f"blocks.{index}"] = [norm, linear, x]
    kept["head"] = [model.head(x)]
    return kept


def test_counts_are_those_of_autograd_for_each_microbatch() -> None:
    engine = make_engine()
    histograms = recorded(engine, ONE_RANK, steps=1)
    assert engine.nominal_weight is not None
    model = make_model()
    found: dict[str, dict[str, list[Tensor]]] = {PARAMETERS: {}, ACTIVATIONS: {}}
    for batch in microbatches(0, ONE_RANK[0]):
        outputs = outputs_of(model, batch.inputs)
        logits = outputs["head"][0]
        total = nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
        wanted = [
            *((ACTIVATIONS, group, value) for group, values in outputs.items() for value in values),
            *((PARAMETERS, group_of(name), value) for name, value in _owners(model)),
        ]
        gradients = torch.autograd.grad(
            total / engine.nominal_weight, [value for _, _, value in wanted]
        )
        for (kind, group, _), gradient in zip(wanted, gradients, strict=True):
            found[kind].setdefault(group, []).append(gradient)
    expected = {
        kind: {group: exponents_of(gradients) for group, gradients in groups.items()}
        for kind, groups in found.items()
    }
    assert exponents(histograms) == expected


def _owners(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters with the names of their modules."""
    return [(name.rpartition(".")[0], value) for name, value in model.named_parameters()]


@ranks(2, timeout=110)
def test_strategies_agree() -> None:
    of_ddp, of_fsdp = (recorded(make_engine(strategy=strategy)) for strategy in ("ddp", "fsdp"))
    assert exponents(of_ddp) == exponents(of_fsdp)
    single = recorded(make_engine(strategy="ddp"), steps=1)
    here = sum(len(batch.labels) > 0 for batch in microbatches(0, TWO_RANKS[0], 0))
    assert here == 2
    head = single[PARAMETERS]["head"]
    # Two ranks with two microbatches each.
    assert head.values == 4 * make_model().head.weight.numel()


def test_bfloat16_gradients_count_as_often() -> None:
    wide, narrow = (recorded(make_engine(policy=policy), ONE_RANK) for policy in ("fp32", "bf16"))
    assert wide[PARAMETERS].keys() == narrow[PARAMETERS].keys()
    for group, histogram in wide[PARAMETERS].items():
        assert narrow[PARAMETERS][group].values == histogram.values


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
    found = recorder.histograms(None)
    values = {kind: {g: h.values for g, h in of_kind.items()} for kind, of_kind in found.items()}
    assert values == {
        # One gradient of the weight that is used three times.
        PARAMETERS: {"(model)": 3, "twice": 9},
        ACTIVATIONS: {"(model)": 15, "twice": 30, "tied": 15, "pair": 15},
    }


def test_a_larger_loss_moves_the_recommendation() -> None:
    scales = []
    for factor in (1.0, 2.0**10):
        engine = make_engine()
        with GradientRecorder(engine.module, CPU) as recorder:
            batches = [batch._replace(factor=factor) for batch in microbatches(0, ONE_RANK[0])]
            engine.step(batches)
        head = recorder.histograms(None)[PARAMETERS]["blocks.1"]
        scales.append(2.0 ** (12 - max(head.exponents)))
        # The smallest gradients of this small model need a lower scale.
        assert head.recommended_scale() <= scales[-1]  # type: ignore[operator]
    assert scales[0] == scales[1] * 2.0**10
    assert loss(make_model(), batches[0])[0] > 1000


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("", "(model)"),
        ("head", "head"),
        ("blocks", "blocks"),
        ("blocks.11", "blocks.11"),
        ("blocks.11.attention.query", "blocks.11"),
        ("model.layers.3.mlp.experts.7.up", "model.layers.3"),
        ("model.embed_tokens", "model.embed_tokens"),
        ("vision.stem.conv.inner", "vision.stem"),
        ("0", "0"),
    ],
)
def test_layer_groups(module: str, group: str) -> None:
    assert group_of(module) == group
