"""`check_gradient` finds no fault in right training steps, and names the class of wrong ones."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.errors import ConfigError, SetupError
from distmp.testing import GradientError, check_gradient
from distmp.utils.generators import seed_all
from tests.ranks import ranks
from tests.testing import scripts
from tests.testing.scripts import make_model, samples

torch.set_num_threads(1)
HEAD_ONLY = (scripts.head_not_reduced, scripts.head_on_one_rank)


def kinds(train_step: scripts.TrainStep, model: nn.Module, **options: Any) -> list[str]:
    with pytest.raises(GradientError) as failure:
        check_gradient(train_step, model, samples(), **options)
    for mismatch in failure.value.mismatches:
        if mismatch.kind != "not_finite":
            head_only = train_step in HEAD_ONLY
            assert set(mismatch.parameters) == (
                {"head.weight"} if head_only else {*dict(make_model().named_parameters())}
            )
    return [mismatch.kind for mismatch in failure.value.mismatches]


@pytest.mark.parametrize(("kind", "train_step"), [*scripts.local_wrong()])
def test_wrong_steps_of_one_process_are_named(kind: str, train_step: scripts.TrainStep) -> None:
    found = kinds(train_step, make_model())
    assert kind in found
    assert kind == "not_finite" or found == [kind]


def test_message_names_class_and_fix() -> None:
    line = r"\n- microbatch_means: .* off, relative\); fix: use distmp\.global_mean$"
    with pytest.raises(GradientError, match=line):
        check_gradient(scripts.microbatch_means, make_model(), samples())


@ranks(2)
def test_wrong_steps_of_two_ranks_are_named() -> None:
    for kind, train_step in scripts.distributed_wrong():
        assert kinds(train_step, make_model()) == [kind], train_step.__name__


@ranks(2)
def test_weights_that_differ_between_ranks_are_named() -> None:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * dist.get_rank()
    assert kinds(scripts.token_mean, model) == ["different_weights"]


RIGHT = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "tied weights": {"tied": True},
    "checkpointing": {"checkpointed": True, "dropout": 0.3},
}


@pytest.mark.parametrize("options", RIGHT.values(), ids=RIGHT)
def test_right_steps_have_no_mismatch(options: dict[str, Any]) -> None:
    for train_step in (scripts.token_mean, scripts.autocast, scripts.returned):
        check_gradient(train_step, make_model(**options), samples())


def test_default_dtype_of_torch_is_not_that_of_the_reference() -> None:
    model = make_model()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check_gradient(scripts.token_mean, model, samples())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm(training: bool) -> None:
    """Statistics of microbatches are part of the gradient in training mode."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).train(training)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 4, generator=generator)
    labels = torch.randint(3, (12,), generator=generator)

    def train_step(model: nn.Module, microbatches: scripts.Microbatches) -> None:
        total = scripts.tokens_of(microbatches)
        for tokens, wanted in microbatches:
            loss = nn.functional.cross_entropy(model(tokens), wanted, reduction="sum")
            (loss / total).backward()

    check = [*zip(inputs, labels, strict=True)]
    if training:  # of one sample there are no statistics
        check = [(row.expand(2, 4) + torch.arange(2)[:, None], y) for row, y in check]
        model.insert(0, nn.Flatten(0, 1))
        model.append(nn.Unflatten(0, (-1, 2)))
        model.append(Mean())
    check_gradient(train_step, model, check)


def drop_path(x: Tensor, training: bool) -> Tensor:
    """Drop samples as models of Transformers do: drawn in the dtype of the activations."""
    kept = 0.7 + torch.rand(len(x), *[1] * (x.ndim - 1), dtype=x.dtype)
    return x / 0.7 * kept.floor_() if training else x


DRAWN = {
    "drop path": drop_path,
    "dropout without training": lambda x, _: torch.native_dropout(x, 0.3, False)[0],
    "noise": lambda x, training: x + torch.randn_like(x) * torch.empty_like(x).uniform_(),
    "LayerDrop": lambda x, training: x * (random.random() < 0.7),
    "numpy": lambda x, training: x * float(np.random.rand()),
}


class Drawn(scripts.Model):
    """Multiplies its linear layer with random numbers."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def _block(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden + self.draw(torch.tanh(self.linear(hidden)), self.training))


def with_other_sign(model: nn.Module, microbatches: scripts.Microbatches) -> None:
    scripts.token_mean(model, microbatches)
    scripts.divide(model, -1)


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_random_numbers_are_those_of_the_step_in_every_dtype(draw: Any) -> None:
    seed_all(0)
    model = Drawn(draw)
    for train_step in (scripts.token_mean, scripts.autocast):
        check_gradient(train_step, model, samples())
    check_gradient(scripts.token_mean, copy.deepcopy(model).double(), samples())
    for train_step, kind in (
        (scripts.microbatch_means, "microbatch_means"),
        (with_other_sign, "constant"),
        (functools.partial(in_autocast, scripts.microbatch_means), "microbatch_means"),
    ):
        assert kinds(train_step, model) == [kind]


def test_random_numbers_of_an_own_generator_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Drawn(lambda x, training: 4 * x * torch.rand(x.shape, generator=generator).round())
    for train_step in (scripts.token_mean, scripts.microbatch_means):
        with pytest.raises(ConfigError, match="gradients against float64"):
            check_gradient(train_step, model, samples())


def test_random_numbers_of_kernels_are_refused() -> None:
    """Float64 draws others, so that it is no reference for a mean of means."""
    model = Drawn(lambda x, training: 4 * x * torch.ops.distmp_test.drawn_mask(x.detach()))
    with torch.library._scoped_library("distmp_test", "DEF") as library:
        library.define("drawn_mask(Tensor x) -> Tensor")
        library.impl("drawn_mask", drawn_mask, "CompositeExplicitAutograd")
        for train_step in (scripts.token_mean, scripts.microbatch_means):
            with pytest.raises(ConfigError, match="without dropout in fused kernels"):
                check_gradient(train_step, model, samples())


def drawn_mask(x: Tensor) -> Tensor:
    """Consume random numbers by the bytes of the dtype, as vectorized kernels do."""
    return torch.randint(2, (*x.shape, x.itemsize))[..., 0].to(x.dtype)


def fused_dropout(x: Tensor, p: float, training: bool) -> tuple[Tensor, Tensor]:
    mask = drawn_mask(x)
    return x * mask / (1 - p), mask.bool()


@pytest.mark.filterwarnings("ignore:.*operators may also be overridden")
def test_dropout_of_gpus_is_that_of_the_step() -> None:
    model = Drawn(lambda x, training: torch.ops.aten.native_dropout(x, 0.5, True)[0])
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("native_dropout", fused_dropout, "CPU")
        for train_step in (scripts.token_mean, scripts.autocast):
            check_gradient(train_step, model, samples())
        assert kinds(scripts.microbatch_means, model) == ["microbatch_means"]


def test_gradients_that_cancel_are_refused() -> None:
    """Rounding to bf16 changes their sum by more than a tenth."""
    model = nn.Linear(16, 1, bias=False)
    nn.init.zeros_(model.weight)
    inputs = torch.rand(16, generator=torch.Generator().manual_seed(0))
    pairs = [(inputs * (1 + index / 4096), torch.tensor([(-1.0) ** index])) for index in range(12)]

    def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        values, wanted = batch
        loss = nn.functional.mse_loss(model(values).float(), wanted, reduction="sum")
        return loss, len(wanted)

    def train_step(model: nn.Module, microbatches: scripts.Microbatches) -> None:
        total = sum(len(wanted) for _, wanted in microbatches)
        for batch in microbatches:
            (loss_sum(model, batch)[0] / total).backward()

    step = functools.partial(in_autocast, train_step)
    with pytest.raises(ConfigError, match="use microbatches whose gradients do not cancel"):
        check_gradient(step, model, pairs, loss_sum=loss_sum)


def in_autocast(train_step: scripts.TrainStep, model: nn.Module, parts: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        train_step(model, parts)


class Registering(scripts.Model):
    """Registers a buffer in its first forward."""

    def _block(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "factor"):
            self.register_buffer("factor", torch.full((1,), 2.0))
        return super()._block(hidden) * self.factor


def test_buffers_of_the_first_forward() -> None:
    check_gradient(scripts.token_mean, Registering(), samples())
    assert kinds(scripts.microbatch_means, Registering()) == ["microbatch_means"]


class Mean(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.mean(1)


@pytest.mark.slow
def test_a_compiled_model_has_no_mismatch() -> None:
    """Dynamo traces around the hooks that record forwards."""

    def train_step(model: nn.Module, microbatches: scripts.Microbatches) -> None:
        scripts.autocast(torch.compile(model, backend="eager"), microbatches)

    check_gradient(train_step, make_model(), samples(3))


def test_what_cannot_be_checked_is_refused() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="weights = 'words': use one of tokens, samples, sum"):
        check_gradient(scripts.token_mean, model, samples(), "words")
    with pytest.raises(ConfigError, match="number of samples = 2: pass at least 3"):
        check_gradient(scripts.token_mean, model, samples(2))
    ragged = [(torch.zeros(n), torch.zeros(n)) for n in range(4)]
    with pytest.raises(ConfigError, match=r"samples = .*pad them, or pass collate="):
        check_gradient(scripts.token_mean, model, ragged)
    with pytest.raises(SetupError, match="pass loss_sum"):
        check_gradient(lambda model, microbatches: None, model, [torch.zeros(3)] * 3)
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(SetupError, match=r"'phase' = .*torch\.view_as_complex"):
        check_gradient(scripts.token_mean, model, samples())


def popped_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Changes the microbatch, and its tensors."""
    labels = batch.pop("labels")
    tokens = batch["x"].add_(1).remainder_(scripts.VOCABULARY)
    return scripts.cross_entropy(model, (tokens, labels), "sum"), (labels != -100).sum()


@pytest.mark.parametrize("collate", [None, lambda rows: rows[0]])
def test_microbatches_may_be_changed_in_place(collate: Any) -> None:
    def train_step(model: nn.Module, batches: list[Any]) -> None:
        total = scripts.tokens_of([(each["x"], each["labels"]) for each in batches])
        while batches:
            (popped_loss(model, batches.pop())[0] / total).backward()

    rows = [{"x": tokens, "labels": labels} for tokens, labels in samples(3)]
    if collate:
        rows = [{name: tensor[None] for name, tensor in row.items()} for row in rows]
    check_gradient(train_step, make_model(), rows, loss_sum=popped_loss, collate=collate)


def test_16_bit_parameters_sum_microbatches_in_16_bits() -> None:
    with pytest.raises(GradientError, match="microbatches summed in 16 bits") as failure:
        check_gradient(scripts.token_mean, make_model().bfloat16(), samples())
    (mismatch,) = failure.value.mismatches
    assert {"linear.weight", "head.weight"} <= {*mismatch.parameters}
    assert 1e-3 < mismatch.size < 3e-2


def test_the_mean_over_samples_can_be_wanted() -> None:
    check_gradient(scripts.sample_mean, make_model(), samples(), "samples")
    check_gradient(scripts.not_normalized, make_model(), samples(), "sum")
    assert kinds(scripts.token_mean, make_model(), weights="samples") == ["token_mean"]


def test_one_factor_of_equal_gradients_is_a_constant_or_clipping() -> None:
    """The mean over samples is the same in every division."""

    def scaled(model: nn.Module, microbatches: scripts.Microbatches) -> None:
        scripts.sample_mean(model, microbatches)
        scripts.divide(model, 1 / 0.3)

    with pytest.raises(GradientError, match=r"multiplied by a constant: 0\.3, or clipped to the"):
        check_gradient(scaled, make_model(), samples(), "samples")


def test_clipping_on_purpose_is_right() -> None:
    check_gradient(scripts.clipped, make_model(), samples(), max_norm=0.1)


@ranks(2)
def test_right_steps_of_two_ranks_have_no_mismatch() -> None:
    check_gradient(scripts.token_mean, make_model(dropout=0.3), samples())
    check_gradient(scripts.autocast, make_model(), samples())
    check_gradient(scripts.ddp_no_sync, make_model(tied=True), samples())
    check_gradient(scripts.ddp_every_microbatch, make_model(checkpointed=True), samples())
    check_gradient(scripts.ddp_no_sync, scripts.frozen(make_model()), samples())
    model = scripts.sharded()
    check_gradient(scripts.fsdp2, model, samples())
    check_gradient(scripts.fsdp2, scripts.sharded(torch.bfloat16, torch.float32), samples())
    check_gradient(scripts.global_mean, model, samples())
    check_gradient(scripts.global_mean, make_model(), samples())
    accelerated = scripts.Accelerated(make_model())
    check_gradient(accelerated.train_step, accelerated.model, samples())


@ranks(2)
def test_wrong_sharded_steps_are_named() -> None:
    bf16 = scripts.sharded(torch.bfloat16, torch.bfloat16)
    assert kinds(scripts.fsdp2, bf16) == ["reduced_in_16_bits"]
    model = scripts.sharded()
    assert kinds(scripts.fsdp2_rank_means, model) == ["rank_means"]
    assert kinds(scripts.fsdp2_clipped_by_shard, model) == ["shard_clipped"]
    wrapped = scripts.fsdp1()
    check_gradient(scripts.fsdp2, wrapped, samples(), reference=make_model())
    assert kinds(scripts.fsdp2_rank_means, wrapped, reference=make_model()) == ["rank_means"]
    with pytest.raises(ConfigError, match=r"FullyShardedDataParallel.*reference="):
        check_gradient(scripts.fsdp2, wrapped, samples())


@ranks(2)
def test_other_terms_of_the_loss_are_no_clipping() -> None:
    for make, factor in itertools.product((make_model, scripts.sharded), (2e-4, 5e-5, 3e-5)):
        step = functools.partial(scripts.with_z_loss, factor=factor)
        with pytest.raises(GradientError, match=r"fix: .*pass loss_sum=") as failure:
            check_gradient(step, make(), samples())
        assert [each.kind for each in failure.value.mismatches] == ["unexplained"]


@ranks(2)
def test_parts_of_a_replicated_gradient_are_no_shards() -> None:
    def train_step(model: nn.Module, microbatches: list[Any]) -> None:
        scripts.token_mean(model, microbatches)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.flatten()[: parameter.numel() // 2] *= 0.5

    assert kinds(train_step, make_model()) == ["unexplained"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_values_in_autocast_are_right(seed: int, dtype: torch.dtype) -> None:
    def train_step(model: nn.Module, microbatches: list[Any]) -> None:
        tokens = sum((labels != -100).sum() for _, labels in microbatches)
        for inputs, labels in microbatches:
            with torch.autocast("cpu", dtype):
                total = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            (total / tokens).backward()

    torch.manual_seed(seed)
    layers = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)
    for model, count in ((nn.Linear(8, 4), 12), (nn.Sequential(*layers), 96)):
        samples = [(torch.randn(8), torch.tensor(index % 4)) for index in range(count)]
        check_gradient(train_step, model, samples)
