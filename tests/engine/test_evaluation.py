"""Metrics of an evaluation: one forward, the mean over all ranks, and what is refused."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distmp.data.dataloader import DataLoader
from distmp.data.evaluation import ForwardOnly
from distmp.engine.engine import Engine
from distmp.errors import ConfigError
from distmp.models.loss import next_token_loss
from distmp.models.metrics import accuracy, find_metric
from distmp.models.transformer import Transformer, TransformerConfig
from tests.ranks import ranks
from tests.reference import (
    TWO_RANKS,
    Batch,
    fused_adamw,
    loss,
    make_engine,
    make_model,
    replace_loss,
    samples,
)

STEP = TWO_RANKS[0]


def right(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return (outputs.argmax(-1) == batch.labels).sum(), len(batch.labels)


def magnitude(outputs: Tensor, batch: Batch) -> tuple[float, Tensor]:
    """A number, and a weight that is not the one of the loss."""
    return float(outputs.double().abs().sum()), torch.tensor([outputs.numel()])


@ranks(2)
def test_samples_of_any_kind_count_once_if_they_do_not_divide_over_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, 9, 6, generator=generator)
    # Pairs of floating-point numbers have no target that a loss could skip.
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, microbatch_size=2)

    def squares(module: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        return (module(batch[0]).sum(-1) - batch[1].sum(-1)).square().sum(), len(batch[0])

    for strategy in ("ddp", "fsdp"):
        engine = make_engine(strategy=strategy, policy="fp32")
        replace_loss(engine, squares)
        found = engine.evaluate_metrics(
            loader.once(), {"sum": lambda _, batch: (float(batch[1].sum()), len(batch[1]))}
        )
        with torch.no_grad():
            errors = make_model().double()(inputs.double()).sum(-1) - targets.double().sum(-1)
        assert found.loss == pytest.approx(float(errors.square().mean()), rel=1e-5)
        assert found.metrics["sum"] == pytest.approx(float(targets.sum(-1).mean()), rel=1e-5)


@ranks(2)
def test_metrics_are_means_over_all_ranks_from_one_forward() -> None:
    for strategy, policy in (("ddp", "fp32"), ("fsdp", "fp32"), ("ddp", "bf16")):
        engine = make_engine(strategy=strategy, policy=policy)
        forwards: list[nn.Module] = []
        handle = engine.module.register_forward_hook(
            lambda module, *_, calls=forwards: calls.append(module)
        )
        whole = samples(0, sum(map(sum, STEP)))
        flat = [size for sizes in STEP for size in sizes]
        parts = [
            Batch(*part)
            for part in zip(whole.inputs.split(flat), whole.labels.split(flat), strict=True)
        ]
        own = parts[:2] if engine.world.rank == 0 else parts[2:]
        # A repeated microbatch keeps ranks in step, and must not count.
        padding = ForwardOnly(own[0])
        found = engine.evaluate_metrics([*own, padding], {"right": right, "size": magnitude})
        assert len(forwards) == len(own) + 1
        handle.remove()
        with torch.no_grad():
            logits = make_model().double()(whole.inputs.double())
        tolerance = {"rel": 1e-6 if policy == "fp32" else 2e-2}
        assert found.metrics["right"] == float((logits.argmax(-1) == whole.labels).double().mean())
        assert found.metrics["size"] == pytest.approx(float(logits.abs().mean()), **tolerance)
        expected = float(F.cross_entropy(logits, whole.labels))
        assert found.loss == pytest.approx(expected, **tolerance)
        assert found.loss == engine.evaluate([*own, padding])
        engine.step(own)  # no hook is left that keeps outputs


def test_metrics_of_samples_without_loss_do_not_depend_on_the_microbatch_size() -> None:
    engine = make_engine(policy="fp32")
    replace_loss(engine, lambda model, batch: (model(batch[0]).sum(), batch[2].sum()))
    whole = samples(0, 6)
    batch = whole.inputs, whole.labels, torch.tensor([0, 0, 1, 1, 0, 1])
    samplewise = zip(*(tensor.split(1) for tensor in batch), strict=True)

    def mean(outputs: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        weight = batch[2].sum()
        return (batch[0].sum(1) * batch[2]).sum() / weight * weight, weight

    metrics = {"right": lambda outputs, batch: right(outputs, Batch(*batch)), "mean": mean}
    of_one, of_each = (engine.evaluate_metrics(of, metrics) for of in ([batch], samplewise))
    assert of_one.metrics == pytest.approx(of_each.metrics)


def test_a_model_that_computes_its_loss_returns_logits_to_metrics() -> None:
    config = TransformerConfig(
        vocabulary_size=11, sequence_length=8, layers=1, dimension=16, heads=2, hidden=32
    )
    model = Transformer(config)
    engine = Engine(model, next_token_loss, fused_adamw, policy="fp32", device="cpu")
    tokens = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:].clone()}
    batch["targets"][0, :3] = -100
    found = engine.evaluate_metrics([batch], {"accuracy": accuracy})
    with torch.no_grad():
        predicted = model(batch["inputs"]).argmax(-1)
    counted = batch["targets"] != -100
    expected = (predicted == batch["targets"])[counted].double().mean()
    assert found.metrics["accuracy"] == pytest.approx(float(expected))
    assert found.loss == pytest.approx(engine.evaluate([batch]), rel=1e-6)
    assert model.takes_targets


def calls_parts(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return model.head(model.first(batch.inputs)).sum(), len(batch.labels)


def calls_twice(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return (model(batch.inputs) * model(2 * batch.inputs)).sum(), len(batch.labels)


def distance(outputs: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    one, two = outputs
    return (one - two).square().sum(), len(batch.labels)


def test_outputs_of_several_calls_are_a_tuple() -> None:
    engine = Engine(make_model(), calls_twice, fused_adamw, policy="fp32", device="cpu")
    batch = samples(0, 4)
    with torch.no_grad():
        model = make_model()
        expected = float((model(batch.inputs) - model(2 * batch.inputs)).square().sum() / 4)
    found = engine.evaluate_metrics([batch], {"distance": distance})
    assert found.metrics["distance"] == pytest.approx(expected)


def test_numbers_of_python_and_numpy_count_and_negative_weights_give_no_mean() -> None:
    engine = Engine(make_model(), loss, fused_adamw, policy="fp32", device="cpu")
    metrics: dict[str, Any] = {
        "numpy": lambda outputs, batch: (np.float32(1.5), np.int64(3)),
        "float": lambda outputs, batch: (0.1, 1.0),
        "negative": lambda outputs, batch: (3.0, torch.tensor(-2) if len(outputs) == 4 else 8),
    }
    found = engine.evaluate_metrics([samples(0, 4), samples(1, 2)], metrics).metrics
    assert found["numpy"] == 0.5
    assert found["float"] == 0.1  # not rounded to FP32
    assert math.isnan(found["negative"])


def hits(outputs: Tensor, batch: Batch) -> Tensor:
    return (outputs.argmax(-1) == batch.labels).float()


@pytest.mark.parametrize(
    ("metric", "warned"),
    [
        (lambda outputs, batch: (hits(outputs, batch).mean(), len(outputs)), True),
        (lambda outputs, batch: (hits(outputs, batch).mean().item(), len(outputs)), True),
        (lambda outputs, batch: (float(hits(outputs, batch).mean()), len(outputs)), True),
        (lambda outputs, batch: (F.cross_entropy(outputs, batch.labels), len(outputs)), True),
        (lambda outputs, batch: (nn.L1Loss()(outputs, outputs + 1), torch.tensor(4)), True),
        (lambda outputs, batch: (hits(outputs, batch).mean(), 1), False),
        (lambda outputs, batch: (hits(outputs, batch).mean() * 4, 4), False),
        (lambda outputs, batch: (outputs.mean(-1).sum(), len(outputs)), False),
        (lambda outputs, batch: (torch.vmap(torch.mean)(outputs).sum(), len(outputs)), False),
        (right, False),
    ],
)
def test_a_metric_that_is_a_mean_is_warned_of_once(
    metric: Any, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    batches = [samples(0, 4), samples(1, 3)]
    results = []
    for checks in (True, False):
        engine = make_engine(policy="fp32", first_step_checks=checks)
        results += [engine.evaluate_metrics(batches, {"metric": metric}) for _ in range(2)]
        found = [each for each in recwarn if "the metric 'metric' looks like" in str(each.message)]
        assert [each.filename for each in found] == [__file__] * warned
    assert len({*map(repr, results)}) == 1


@ranks(2)
def test_a_warning_that_is_an_error_keeps_no_rank_waiting() -> None:
    rank = dist.get_rank()
    engine = make_engine(policy="fp32")
    metrics = {"metric": lambda outputs, batch: (hits(outputs, batch).mean(), len(outputs))}
    expected = pytest.raises(RuntimeWarning, match="looks like") if rank == 0 else nullcontext()
    with warnings.catch_warnings(), expected:
        warnings.simplefilter("error", RuntimeWarning)
        engine.evaluate_metrics([samples(rank, 4)], metrics)
    dist.barrier()


@pytest.mark.parametrize(
    ("function", "metric", "message"),
    [
        (calls_parts, right, "the loss function did not call the model that is passed to it"),
        (loss, lambda outputs, batch: outputs.sum(), "return a tuple of a sum"),
        (loss, lambda outputs, batch: (outputs, 1), "return a tuple of a sum"),
    ],
)
def test_invalid_metric_is_one_message(function: Any, metric: Any, message: str) -> None:
    engine = Engine(make_model(), function, fused_adamw, policy="fp32", device="cpu")
    with pytest.raises(ConfigError) as caught:
        engine.evaluate_metrics([samples(0, 4)], {"right": metric})
    assert message in str(caught.value)
    assert str(caught.value).startswith("validation.metrics")


@pytest.mark.parametrize(
    "batch", [{"targets": torch.zeros(4, 2)}, {"labels": torch.zeros(4)}, (torch.zeros(4, 6), None)]
)
def test_accuracy_needs_a_class_per_sample(batch: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        accuracy(torch.zeros(4, 5), batch)
    assert str(caught.value).startswith(
        "validation.metrics = 'accuracy': needs logits [..., classes] and integer targets [...] as "
        "batch['targets'] or batch[1], but the model returned [4, 5]"
    )


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("loss", "accuracy", "choose another name"),
        ("ema_accuracy", "accuracy", "choose another name"),
        ("top/5", "accuracy", "choose another name"),
        ("right", "accuracies", "write an import path"),
        ("right", "json:decoder", "is a module; name a function or a class"),
        ("right", "json:dumps", "cannot be called as metric(outputs, batch): too many positional"),
    ],
)
def test_names_and_paths_are_checked(name: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_metric(name, path)
    assert str(caught.value).startswith(f"validation.metrics.{name} = {path!r}: ")
    assert message in str(caught.value)


class Adapted(nn.Linear):
    """Adapters like those of loralib: `eval` merges them, `train` separates them."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.requires_grad_(False)
        self.low_rank = nn.Parameter(torch.full((4, 1), 0.5))
        self.is_merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.is_merged:
            change = self.low_rank.detach() @ self.low_rank.detach().T
            self.weight.data += -change if mode else change
            self.is_merged = not mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs if self.is_merged else outputs + inputs @ self.low_rank @ self.low_rank.T


def engine_of_squares(model: nn.Module) -> Engine:
    return Engine(
        model,
        lambda module, batch: (module(batch).square().sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.01),
        policy="fp32",
        device="cpu",
    )


def test_parts_that_act_on_their_mode_are_trained_after_an_evaluation_as_without_one() -> None:
    losses = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(), nn.BatchNorm1d(4).eval(), nn.Dropout(0.0))
        engine = engine_of_squares(model)
        batch = torch.randn(8, 4)
        engine.step([batch])
        if evaluates:
            engine.evaluate([batch])
        assert [part.training for part in model] == [True, False, True]
        losses.append([engine.step([batch]).numbers.loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_parts_that_are_evaluated_in_training_keep_their_weights() -> None:
    model = nn.Sequential(Adapted(), nn.Dropout(0.0))
    engine = engine_of_squares(model)
    model[0].eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(4, 4))  # rounded when it is separated and merged again
    weight = model[0].weight.clone()
    for _ in range(20):
        engine.evaluate([torch.ones(2, 4)])
    assert torch.equal(model[0].weight, weight)
    assert [part.training for part in model.modules()] == [True, False, True]


@ranks(2)
def test_an_evaluation_in_inference_mode_leaves_the_engine_usable() -> None:
    engine = make_engine(policy="bf16", strategy="fsdp")
    batch = samples(0, 4)
    with torch.inference_mode():
        found = engine.evaluate([batch])
    assert found == pytest.approx(engine.evaluate([batch]))
    assert not engine.step([batch]).numbers.skipped


def test_a_loader_of_steps_is_refused() -> None:
    dataset = TensorDataset(torch.ones(2, 6))
    loader = DataLoader(dataset, batch_size=2, microbatch_size=1)
    with pytest.raises(ConfigError, match=r"'DataLoader': yields lists .* pass loader\.once\(\)"):
        make_engine(policy="fp32").evaluate(loader)
