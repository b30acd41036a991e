"""`audit` around steps of running scripts."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_
from torch.utils.data import default_collate

import distmp
from distmp.errors import ConfigError
from distmp.testing import AuditReport, check_gradient
from distmp.utils.generators import seed_all
from tests.ranks import ranks
from tests.testing import scripts
from tests.testing.scripts import make_model

torch.set_num_threads(1)


@pytest.fixture
def fresh_accelerator() -> Iterator[Any]:
    """The class, for a test that creates one with other settings than tests before and after it."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Labelled(nn.Module):
    """Takes and returns what models of transformers do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = make_model(**options)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(input_ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


def microbatches(step: int) -> list[dict[str, Tensor]]:
    """Return two microbatches of this rank with different numbers of labels."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(10 * step + rank)
    found = []
    for size, length in ((2, 1 + rank), (4, 5 - rank)):
        tokens, labels = torch.randint(scripts.VOCABULARY, (2, size, 6), generator=generator)
        labels[:, length:] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def total(batches: list[dict[str, Tensor]]) -> Tensor:
    return scripts.tokens_of([(each["input_ids"], each["labels"]) for each in batches])


def mean_of_means(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    for batch in batches:
        (model(**batch)["loss"] / len(batches)).backward()


def token_mean(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    """Right under DDP and FSDP, which divide by the number of ranks."""
    factor = scripts.ranks() / total(batches)
    for batch in batches:
        tokens = (batch["labels"] != -100).sum()
        (model(**batch)["loss"] * tokens * factor).backward()


def divided(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    """The mean over tokens, divided by the number of microbatches again."""
    factor = scripts.ranks() / total(batches) / len(batches)
    for batch in batches:
        tokens = (batch["labels"] != -100).sum()
        (model(**batch)["loss"] * tokens * factor).backward()


class Scaled(nn.Module):
    """Multiplies the loss."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(**batch)["loss"] * self.scale}


def audited(
    model: nn.Module,
    backward: Callable[[nn.Module, list[dict[str, Tensor]]], None],
    before_step: Callable[[nn.Module], object] = lambda model: None,
    steps: int = 2,
) -> AuditReport:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, microbatches(step))
            before_step(model)
            optimizer.step()
    return audit.report


def kinds(report: AuditReport) -> list[str]:
    return [kind for kind, _ in report.mismatches]


def test_steps_of_one_process() -> None:
    model = Labelled(dropout=0.2, tied=True)
    right, wrong = audited(model, token_mean), audited(model, mean_of_means)
    assert (right.mismatches, right.undecided, right.exit_code, right.steps) == ((), (), 0, 2)
    assert (kinds(wrong), wrong.exit_code) == (["microbatch_means"], 1)


# Losses outside of the model


def audited_loop(model: nn.Module, train_step: Callable[..., Any]) -> AuditReport:
    """Audit steps of loops in which labels do not enter `forward`."""
    parts = scripts.samples(24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        for step in range(2):
            optimizer.zero_grad()
            start = 12 * step + 6 * (dist.get_rank() if dist.is_initialized() else 0)
            own = parts[start : start + 6]
            train_step(model, [*map(default_collate, (own[:1], own[1:3], own[3:]))])
            optimizer.step()
    return audit.report


# Losses of several weights, or of no loss function of torch, and clipping that is seen.
OTHER = {"sample_mean": 2, "not_finite": 2, "clipped": 0}


@pytest.mark.parametrize(("kind", "train_step"), [*scripts.local_wrong()])
def test_wrong_loops_of_one_process(kind: str, train_step: Callable[..., Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    report = audited_loop(make_model(dropout=0.2), train_step)
    if kind in OTHER:
        assert (kinds(report), report.exit_code) == ([], OTHER[kind]), str(report)
    else:
        assert kinds(report) == [kind], str(report)
    del scaler
    if kind == "loss_scale":
        report = audited_loop(make_model(), train_step)
        assert (kinds(report), report.exit_code) == ([], 2), str(report)


@pytest.mark.parametrize("train_step", [scripts.token_mean, scripts.autocast])
def test_right_loops_of_one_process(train_step: Callable[..., Any]) -> None:
    report = audited_loop(make_model(tied=True, checkpointed=True), train_step)
    assert report.exit_code == 0, str(report)


@ranks(2)
def test_loops_of_two_ranks() -> None:
    for kind, train_step in scripts.distributed_wrong():
        report = audited_loop(make_model(), train_step)
        assert kind in kinds(report), f"{kind}: {report}"
    for train_step in (scripts.token_mean, scripts.ddp_no_sync, scripts.global_mean):
        report = audited_loop(make_model(), train_step)
        assert report.exit_code == 0, str(report)
    report = audited_loop(scripts.sharded(torch.bfloat16, torch.float32), scripts.fsdp2)
    assert report.exit_code == 0, str(report)
    report = audited_loop(scripts.sharded(), scripts.fsdp2_rank_means)
    assert kinds(report) == ["rank_means"]


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), F.one_hot(batch[1].clamp(min=0), scripts.VOCABULARY) * 1.0)


def penalty(model: nn.Module) -> Tensor:
    return sum(p.square().sum() for p in model.parameters())


def penalty_of_norms(model: nn.Module) -> Tensor:
    return torch.stack(torch._foreach_norm([*model.parameters()])).sum()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (squares, "right"),
        (lambda model, batch: squares(model, batch) / 2, "unless the loss has this weight"),
        (
            lambda model, batch: 3 * squares(model, batch),
            "constant: 3; unless the",
        ),
        (
            lambda model, batch: squares(model, batch) + penalty(model),
            "penalties, gradients of inputs or other models may be a part of the step",
        ),
        (
            lambda model, batch: squares(model, batch) + penalty_of_norms(model),
            "penalties, gradients of inputs or other models may be a part of the step",
        ),
        (lambda model, batch: model(batch[0]).square().mean(), "right"),
        (lambda model, batch: -model(batch[0]).sigmoid().mean(), "right"),
        (lambda model, batch: model(batch[0]).square().sum(), "no loss function of torch"),
        (lambda model, batch: model(batch[0]).square().sum().mean(), "no loss function of torch"),
        (
            lambda model, batch: torch.stack(
                [model(row).square().sum() for row in batch[0]]
            ).mean(),
            "no loss function of torch",
        ),
        (
            lambda model, batch: of_classes(model(batch[0]), batch[0]),
            "unless class weights should not count",
        ),
        (lambda model, batch: of_both(model(batch[0]), *batch), "right"),
        (lambda model, batch: masked_in_place(model(batch[0]), batch[1]), "right"),
    ],
)
def test_loss_functions_of_loops(loss: Callable[..., Tensor], expected: str) -> None:
    def train_step(model: nn.Module, batches: scripts.Microbatches) -> None:
        for tokens, labels in batches[:2]:
            (loss(model, (tokens[:1], labels[:1])) / 2).backward()

    report = audited_loop(make_model(), train_step)
    assert report.exit_code == (0 if expected == "right" else 2), str(report)
    assert expected in str(report)


def test_losses_whose_relative_weights_vary_are_not_decided() -> None:
    def train_step(model: nn.Module, batches: scripts.Microbatches) -> None:
        total = scripts.tokens_of(batches)
        for tokens, labels in batches:
            logits = model(tokens)
            loss = F.cross_entropy(logits.mT, labels, reduction="sum") / total
            other = F.mse_loss(logits[..., 0], tokens.float())  # wrong: a mean of means
            (loss + other / len(batches)).backward()

    report = audited_loop(make_model(), train_step)
    assert (kinds(report), report.exit_code) == ([], 2), str(report)
    assert report.undecided[0].startswith("losses: several, whose weights relative to the first")


@pytest.mark.parametrize(
    ("divisor", "kind"),
    [(lambda tokens: 6 / len(tokens), "right"), (lambda _: 3, "microbatch_means")],
)
def test_a_loss_of_several_forwards(divisor: Callable[[Tensor], float], kind: str) -> None:
    def train_step(model: nn.Module, batches: scripts.Microbatches) -> None:
        for tokens, labels in batches:
            pair = model(tokens), model(labels.clamp(min=0))
            (F.mse_loss(*pair) / divisor(tokens)).backward()

    report = audited_loop(make_model(dropout=0.2), train_step)
    assert (kinds(report) or ["right"], report.undecided) == ([kind], ()), str(report)


def cross_entropy(model: nn.Module, samples: int) -> Tensor:
    return F.cross_entropy(model(torch.randn(samples, 8)), torch.arange(samples) % 4)


def real_and_fake(model: nn.Module, fakes: int = 4) -> Tensor:
    return cross_entropy(model, 4) + cross_entropy(model, fakes)


def real_and_fake_together(model: nn.Module) -> Tensor:
    real, fake = model(torch.randn(4, 8)), model(torch.randn(8, 8))
    return F.cross_entropy(real, torch.arange(4)) + F.cross_entropy(fake, torch.arange(8) % 4)


def probed(model: nn.Module) -> Tensor:
    loss = cross_entropy(model, 4)
    torch.autograd.grad(loss, model[2].weight, retain_graph=True)
    return loss


def probed_for_all(model: nn.Module) -> Tensor:
    loss = cross_entropy(model, 4)
    torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    return loss


def triplet(model: nn.Module) -> Tensor:
    return F.triplet_margin_loss(*(model(torch.randn(4, 8)) for _ in range(3)))


def penalized(model: nn.Module) -> Tensor:
    inputs = torch.randn(4, 8, requires_grad=True)
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return F.cross_entropy(outputs, torch.arange(4)) + gradient.square().mean()


def penalized_alone(model: nn.Module) -> Tensor:
    inputs = torch.randn(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return cross_entropy(model, 4) + gradient.square().mean()


def perturbed(model: nn.Module) -> Tensor:
    """The gradient at weights nearby (SAM)."""
    cross_entropy(model, 4).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.grad
    model.zero_grad()
    return cross_entropy(model, 4)


def adversarial(model: nn.Module) -> Tensor:
    inputs, labels = torch.randn(4, 8, requires_grad=True), torch.arange(4)
    F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad()
    return F.cross_entropy(model(inputs.detach() + 0.1 * inputs.grad.sign()), labels)


def mixed(model: nn.Module) -> Tensor:
    share = float(torch.rand(()))
    outputs, labels = model(torch.randn(4, 8)), torch.arange(4)
    losses = [F.cross_entropy(outputs, each) for each in (labels, labels.flip(0))]
    return share * losses[0] + (1 - share) * losses[1]


def summed_over(features: int) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        outputs = model(torch.randn(4, 8)).repeat(1, features // 4 + 1)[:, :features]
        return F.mse_loss(outputs, torch.ones(4, features), reduction="none").sum(-1).mean()

    return loss


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (real_and_fake, 2),
        (functools.partial(real_and_fake, fakes=8), 2),
        (real_and_fake_together, 2),
        (lambda model: real_and_fake(model) / 2, 0),
        (lambda model: real_and_fake(model) / 4, 2),
        (lambda model: real_and_fake(model, fakes=8) / 2, 2),
        (lambda model: triplet(model), 0),
        (lambda model: triplet(model) / 3, 2),
        (probed, 0),
        (probed_for_all, 0),
        (penalized, 2),
        (penalized_alone, 2),
        (perturbed, 2),
        (adversarial, 2),
        (mixed, 2),
        (summed_over(2), 2),
        (summed_over(64), 2),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_terms_of_a_loss_are_no_microbatches(
    loss: Callable[[nn.Module], Tensor], code: int, count: int
) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with distmp.audit(model, optimizer) as audit:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(count if code == 0 else 1):
                (loss(model) / (count if code == 0 else 1)).backward()
            optimizer.step()
    assert (kinds(audit.report), audit.report.exit_code) == ([], code), str(audit.report)


@pytest.mark.parametrize("options", [{}, {"retain_graph": True}, {"create_graph": True}])
def test_gradients_that_a_script_assigns(options: dict[str, bool]) -> None:
    def assigned(model: nn.Module) -> None:
        parameters = [*model.parameters()]
        found = torch.autograd.grad(cross_entropy(model, 4), parameters, **options)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = 3 * gradient.detach()

    assert "multiplied by a constant: 3" in str(report_of(assigned))


def multiplied(model: nn.Module, count: int, factor: float, reduction: str = "mean") -> None:
    for _ in range(count):
        outputs, labels = model(torch.randn(6, 8)), torch.arange(6) % 4
        (F.cross_entropy(outputs, labels, reduction=reduction) * factor / count).backward()


@pytest.mark.parametrize(
    ("count", "factor", "kind"),
    [
        (1, 2, ""),
        (4, 2, ""),
        (2, 3, ""),  # what microbatches of 6 samples have with two mistakes
        (2, 6, ""),
        (2, 2, "microbatches_never"),
        (2, 0.5, "microbatches_twice"),
    ],
)
def test_a_factor_of_the_losses_may_be_a_weight(count: int, factor: float, kind: str) -> None:
    report = report_of(functools.partial(multiplied, count=count, factor=factor))
    assert kinds(report) == ([kind] if kind else []), str(report)
    assert report.exit_code == (1 if kind else 2)
    assert str(report).count("unless the loss has this weight on purpose: pass loss_sum=") == 1


def backward_twice(model: nn.Module) -> None:
    loss = cross_entropy(model, 6)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("train_step", "kind"),
    [
        (backward_twice, "accumulated_twice"),
        (functools.partial(multiplied, count=2, factor=1, reduction="sum"), "sum"),
    ],
)
def test_factors_of_mistakes_are_no_weights(
    train_step: Callable[[nn.Module], object], kind: str
) -> None:
    report = report_of(train_step)
    assert (kinds(report), report.undecided) == ([kind], ()), str(report)
    assert "on purpose" not in str(report)


def distilled(model: Any) -> Tensor:
    """A term of features, which leave the model beside its outputs."""
    kept: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    loss = cross_entropy(model, 6)
    handle.remove()
    return loss + F.mse_loss(kept[0], torch.ones_like(kept[0]))


def of_two_tasks(model: nn.Module) -> None:
    cross_entropy(model, 6).backward()
    F.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 4)).mul(0.1).backward()


def clamped_by_hooks(model: nn.Module) -> None:
    handles = [p.register_hook(lambda g: g.clamp(-0.02, 0.02)) for p in model.parameters()]
    cross_entropy(model, 6).backward()
    assert handles


def clamped(model: nn.Module) -> None:
    cross_entropy(model, 6).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-0.02, 0.02)


@pytest.mark.parametrize(
    "train_step",
    [lambda model: distilled(model).backward(), of_two_tasks, clamped, clamped_by_hooks],
    ids=["features", "two backwards", "clamped", "hooks"],
)
def test_correct_steps_of_other_kinds_are_not_called_wrong(
    train_step: Callable[[nn.Module], None],
) -> None:
    torch.manual_seed(0)
    report = report_of(train_step)
    assert report.exit_code == 2, report


def test_an_update_without_forward_hides_no_error() -> None:
    def twice(model: nn.Module) -> None:
        for _ in range(2):
            cross_entropy(model, 6).backward()

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        for _ in range(2):
            optimizer.zero_grad()
            twice(model)
            optimizer.step()
            optimizer.step()
    assert (kinds(audit.report), audit.report.steps) == (["microbatches_never"], 2)
    assert "2 updates without a forward" in str(audit.report)


class OfLengths(nn.Linear):
    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, enforce_sorted=False)
        return super().forward(packed.data)


@pytest.mark.gpu
def test_arguments_on_the_cpu_stay_there() -> None:
    model = OfLengths(8, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        outputs = model(torch.randn(5, 3, 8).cuda(), torch.tensor([2, 5, 3]))
        F.cross_entropy(outputs, torch.arange(10).cuda() % 4).backward()
        optimizer.step()
    assert audit.report.exit_code == 0, audit.report


def test_copies_of_the_model_are_not_recorded() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        cross_entropy(model, 6).backward()
        cross_entropy(copy.deepcopy(model), 6).backward()
        optimizer.step()
    assert audit.report.exit_code == 0, audit.report


def test_hooks_that_refuse_gradients_of_frozen_parameters_hide_no_error() -> None:
    model = small()
    for parameter in model[0].parameters():  # as builders do
        parameter.register_post_accumulate_grad_hook(lambda p: None)
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        for _ in range(2):
            cross_entropy(model, 6).backward()
            cross_entropy(model, 6).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert kinds(audit.report) == ["microbatches_never"], audit.report


def test_forwards_without_any_backward_are_named() -> None:
    report = report_of(lambda model: cross_entropy(model, 4))
    assert "microbatches = 0: no forward has a backward" in report.undecided[0]


def report_of(
    train_step: Callable[[nn.Module], object],
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    model: nn.Module | None = None,
) -> AuditReport:
    """Audit two steps of a model, by default a small one, without weights that change."""
    model = small() if model is None else model
    optimizer = optimizer_class(model.parameters(), lr=0.0)  # type: ignore[call-arg]
    with distmp.audit(model, optimizer) as audit:
        for _ in range(2):
            optimizer.zero_grad()
            train_step(model)
            optimizer.step()
    return audit.report


def joined(model: nn.Module, sizes: tuple[int, ...], divisor: float = 1.0) -> None:
    (sum(cross_entropy(model, samples) for samples in sizes) / divisor).backward()


def joined_later(model: nn.Module, sizes: tuple[int, ...]) -> None:
    outputs = [model(torch.randn(samples, 8)) for samples in sizes]
    losses = [F.cross_entropy(each, torch.arange(len(each)) % 4) for each in outputs]
    (sum(losses) / len(losses)).backward()


def joined_sums(model: nn.Module) -> None:
    sum(cross_entropy(model, samples) * samples / 11 for samples in (2, 6, 3)).backward()


@pytest.mark.parametrize(
    ("train_step", "code"),
    [
        (functools.partial(joined, sizes=(2, 6, 3)), 2),
        (functools.partial(joined, sizes=(2, 6, 3), divisor=3), 2),
        (functools.partial(joined, sizes=(4, 4, 4, 4)), 2),
        (functools.partial(joined, sizes=(4, 4, 4, 4), divisor=4), 0),
        (functools.partial(joined_later, sizes=(2, 6, 3)), 2),
        (joined_sums, 0),
    ],
)
def test_microbatches_of_one_backward(train_step: Callable[..., object], code: int) -> None:
    report = report_of(train_step)
    assert (kinds(report), report.exit_code) == ([], code), str(report)


@ranks(2)
def test_microbatches_of_one_backward_on_two_ranks() -> None:
    """A sum of two means looks like two ranks."""
    model = DistributedDataParallel(small())
    for divisor, code in ((1.0, 2), (2.0, 0)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        torch.manual_seed(dist.get_rank())
        with distmp.audit(model, optimizer) as audit:
            joined(model, (4, 4), divisor)
            optimizer.step()
        assert (kinds(audit.report), audit.report.exit_code) == ([], code), str(audit.report)
        optimizer.zero_grad()


@ranks(2)
def test_a_mean_times_its_samples_is_a_sum_on_two_ranks() -> None:
    model = DistributedDataParallel(small())
    torch.manual_seed(dist.get_rank())
    report = report_of(functools.partial(multiplied, count=1, factor=6.0), model=model)
    assert (kinds(report), report.exit_code) == (["sum"], 1), str(report)


@pytest.mark.parametrize("clips", [False, True])
def test_a_scale_of_a_scaler_that_is_gone_is_found(clips: bool) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train_step() -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        scaler.scale(cross_entropy(model, 4)).backward()
        if clips:
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
        else:
            optimizer.step()
        scaler.update(2.0**11)

    with distmp.audit(model, optimizer) as audit:
        train_step()
    assert kinds(audit.report) == ["loss_scale"], str(audit.report)


class Uninitialized(torch.amp.GradScaler):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("scale", [0, None])
def test_scales_that_are_no_numbers_do_not_end_the_script(scale: Any) -> None:
    class WithScale(torch.optim.SGD):
        loss_scale = scale

    uninitialized = Uninitialized()
    report = report_of(lambda model: (3 * cross_entropy(model, 4)).backward(), WithScale)
    assert uninitialized is not None
    assert "multiplied by a constant: 3" in str(report)


def weighted_microbatches(
    model: nn.Module,
    change: Callable[[Tensor], object] = lambda inputs: None,
    other: Callable[[Tensor], Any] = lambda outputs: 0.0,
) -> None:
    for samples in (2, 6, 3):
        inputs = torch.randn(samples, 8)
        change(inputs)
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, torch.arange(samples) % 4) + other(outputs)
        (loss * samples**2 / 49).backward()


def last_of(model: nn.Module, change: Callable[[Tensor], object]) -> None:
    for samples in (2, 6, 3):
        inputs = torch.randn(samples, 8)
        change(inputs)
        model.zero_grad()
        (F.cross_entropy(model(inputs), torch.arange(samples) % 4) / 3).backward()


@pytest.mark.parametrize(
    ("train_step", "kind"),
    [
        (functools.partial(weighted_microbatches, change=lambda x: x.clamp_(-2, 2)), "weighted"),
        (functools.partial(weighted_microbatches, change=Tensor.requires_grad_), "weighted"),
        (
            functools.partial(weighted_microbatches, other=lambda y: 0.1 * y.square().mean()),
            "weighted",
        ),
        (
            functools.partial(
                weighted_microbatches, other=lambda y: 0.1 * F.mse_loss(y, torch.zeros_like(y))
            ),
            "weighted",
        ),
        (functools.partial(last_of, change=Tensor.requires_grad_), "last_microbatch"),
        (lambda model: means_of(model, probes=True), "microbatch_means"),
    ],
)
def test_what_does_not_change_gradients_hides_no_error(
    train_step: Callable[[nn.Module], object], kind: str
) -> None:
    report = report_of(train_step)
    assert kinds(report) == [kind], str(report)


def means_of(model: nn.Module, *, probes: bool) -> None:
    losses = [cross_entropy(model, samples) for samples in (2, 6, 3)]
    if probes:
        torch.autograd.grad(sum(losses), [*model.parameters()], retain_graph=True)
    for loss in losses:
        (loss / 3).backward()


def test_a_tensor_of_the_optimizer_that_is_no_parameter_hides_no_error() -> None:
    temperature = torch.tensor(1.0, requires_grad=True)

    class Both(torch.optim.SGD):
        def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
            super().__init__([*parameters, temperature], lr)

    report = report_of(weighted_microbatches, Both)
    assert kinds(report) == ["weighted"], str(report)


def by_foreach(gradients: list[Tensor], factors: list[Tensor]) -> None:
    torch._foreach_mul_(gradients, factors)


def by_division(gradients: list[Tensor], factors: list[Tensor]) -> None:
    for gradient, factor in zip(gradients, factors, strict=True):
        gradient.div_(1 / factor)


@pytest.mark.parametrize("scale", [by_foreach, by_division])
def test_gradients_that_are_clipped_one_by_one_are_not_called_wrong(
    scale: Callable[[list[Tensor], list[Tensor]], None],
) -> None:
    def step(model: nn.Module) -> None:
        cross_entropy(model, 4).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        scale(gradients, [(0.01 / each.norm()).clamp_(max=1.0) for each in gradients])

    report = report_of(step)
    assert (kinds(report), report.exit_code) == ([], 2), str(report)


@pytest.mark.parametrize(
    ("term", "code"),
    [
        (lambda outputs: 0.1 * outputs.logsumexp(-1).square().mean(), 2),
        (lambda outputs: 0.1 * outputs.square().sum(), 2),
        (
            lambda outputs: F.cross_entropy(
                outputs, torch.zeros(4).long(), reduction="none"
            ).mean(),
            0,
        ),
        (lambda outputs: 0.0 * outputs.sum(), 0),
    ],
)
def test_terms_that_are_no_loss_functions_are_not_decided(
    term: Callable[[Tensor], Tensor], code: int
) -> None:
    def step(model: nn.Module) -> None:
        outputs = model(torch.randn(4, 8))
        (F.cross_entropy(outputs, torch.arange(4)) + term(outputs)).backward()

    report = report_of(step)
    assert (kinds(report), report.exit_code) == ([], code), str(report)


def test_saved_tensors_are_unpacked_by_backward_only() -> None:
    """Offloaded tensors may be read once."""
    offloaded: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        offloaded[len(offloaded)] = tensor
        return len(offloaded) - 1

    def step(model: nn.Module) -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda key: offloaded.pop(key)):
            outputs = model(torch.randn(4, 8))
            losses = F.cross_entropy(outputs, torch.arange(4), reduction="none")
            loss = (losses * torch.ones(4)).sum() / 4 + 0 * outputs.sum()
        loss.backward()
        offloaded.clear()

    assert report_of(step).exit_code == 0


@ranks(2)
def test_outputs_of_other_ranks_are_not_decided() -> None:
    """The gather cuts off a part of the gradient, and the recorded gradients miss it as well."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with distmp.audit(model, optimizer) as audit:
        features = model(torch.randn(4, 8))
        others = [torch.zeros_like(features) for _ in range(2)]
        dist.all_gather(others, features.detach())
        others[dist.get_rank()] = features
        labels = torch.arange(4) + 4 * dist.get_rank()
        F.cross_entropy(features @ torch.cat(others).T, labels).backward()
        optimizer.step()
    assert audit.report.exit_code == 2
    assert "outputs of other ranks" in audit.report.undecided[0]


def test_forward_that_depends_on_a_changed_attribute_is_not_decided() -> None:
    class Annealed(nn.Linear):
        temperature = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.temperature

    model = Annealed(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model, 4).backward()
            optimizer.step()
            model.temperature /= 2
    assert (kinds(audit.report), audit.report.exit_code) == ([], 2), str(audit.report)


@ranks(2)
def test_sparse_gradients_are_compared() -> None:
    model = DistributedDataParallel(nn.EmbeddingBag(16, 4, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with distmp.audit(model, optimizer) as audit:
        F.cross_entropy(model(torch.randint(16, (4, 3))), torch.arange(4)).backward()
        optimizer.step()
    assert audit.report.exit_code == 0, str(audit.report)


@ranks(2)
def test_fsdp_without_reshard_hides_no_error() -> None:
    model = small()
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(dist.get_rank())
    with distmp.audit(model, optimizer) as audit:
        for _ in range(2):
            optimizer.zero_grad()
            model.set_reshard_after_backward(False)
            weighted_microbatches(model)
            for part in (model[0], model[2], model):
                part.reshard()
            optimizer.step()
    assert kinds(audit.report) == ["weighted"], str(audit.report)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("apart", [True, False])
def test_two_networks_that_train_each_other(apart: bool) -> None:
    generator, critic = nn.Linear(8, 8), small()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (generator, critic)]

    def step() -> None:
        fake = generator(torch.randn(4, 8))
        optimizers[1].zero_grad()
        real_loss = F.cross_entropy(critic(torch.randn(4, 8)), torch.ones(4).long())
        if apart:
            real_loss.backward()
        fake_loss = F.cross_entropy(critic(fake.detach()), torch.zeros(4).long())
        (fake_loss if apart else real_loss + fake_loss).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.cross_entropy(critic(fake), torch.ones(4).long()).backward()
        optimizers[0].step()

    for module, optimizer, code in zip((generator, critic), optimizers, (0, 2), strict=True):
        with distmp.audit(module, optimizer) as audit:
            step()
            step()
        assert (kinds(audit.report), audit.report.exit_code) == ([], code), str(audit.report)


@pytest.mark.parametrize(
    ("clipped", "code"), [([0, 1], 2), ([1], 0), ([0], 0)], ids=["both", "other", "own"]
)
def test_clipping_of_several_models(clipped: list[int], code: int) -> None:
    models = small(), small()
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.01)
    with distmp.audit(models[0], optimizer) as audit:
        for _ in range(2):
            optimizer.zero_grad()
            for model in models:
                (cross_entropy(model, 4) * (1 if model is models[0] else 30)).backward()
            clip_grad_norm_([p for each in clipped for p in models[each].parameters()], 0.01)
            optimizer.step()
    assert (kinds(audit.report), audit.report.exit_code) == ([], code), str(audit.report)


def of_both(logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return loss + 0.1 * F.mse_loss(logits[..., 0], labels.float())


def of_classes(logits: Tensor, tokens: Tensor) -> Tensor:
    weight = torch.arange(1.0, scripts.VOCABULARY + 1)
    return F.cross_entropy(logits.mT, tokens, weight, reduction="sum") / tokens.numel()


def masked_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    logits[..., 0] = -100.0
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=1), reduction="none")
    return (losses * torch.tensor([1.0, 1, 1, 0, 0, 0])).sum() / 3 / len(labels)


@contextlib.contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Check that nothing stays installed."""

    def installed() -> list[Any]:
        hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
        patched = [vars(clip_grad), vars(torch.amp.GradScaler), vars(dist)]
        ids = [{name: id(each) for name, each in vars(m).items()} for m in model.modules()]
        ids += [{name: id(p) for name, p in model.named_parameters()}]
        return [hooks, ids, dict(optimizer._optimizer_step_pre_hooks), *map(dict, patched)]

    before = installed()
    yield
    assert installed() == before


def test_nothing_stays_installed() -> None:
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unchanged(model, optimizer), distmp.audit(model, optimizer):
        token_mean(model, microbatches(0))
        optimizer.step()
    failing = pytest.raises(ArithmeticError)
    with unchanged(model, optimizer), failing, distmp.audit(model, optimizer):
        raise ArithmeticError


def test_modes_are_those_of_the_forwards() -> None:
    model = Labelled(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        token_mean(model, microbatches(0))
        optimizer.step()
        model.eval()
    assert audit.report.exit_code == 0, str(audit.report)
    assert not any(part.training for part in model.modules())


def test_clipping_is_part_of_the_step() -> None:
    def clip(model: nn.Module) -> None:
        clip_grad_norm_(model.parameters(), 0.1)  # imported before

    def clip_unseen(model: nn.Module) -> None:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        scripts.divide(model, float(norm) / 0.1)

    assert audited(Labelled(), token_mean, clip).exit_code == 0
    assert kinds(audited(Labelled(), mean_of_means, clip)) == ["microbatch_means"]
    report = audited(Labelled(), token_mean, clip_unseen)
    assert report.exit_code == 2
    assert "clipped" in report.undecided[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clipping_by_the_scaler_of_distmp(fused: bool, momentum: float) -> None:
    """It clips in the optimizer's step; the first one overflows."""

    def report(backward: Callable[..., None], max_norm: float = 0.1) -> AuditReport:
        model = Labelled()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum, fused=fused)
        scaler = distmp.DistributedGradScaler("cpu", init_scale=4.0)
        with distmp.audit(model, optimizer) as audit:
            for step in range(3):
                optimizer.zero_grad()
                scale = float(scaler.scale(torch.ones(())))
                scaled = Scaled(model, scale if step else torch.inf)
                backward(scaled, microbatches(step))
                scaler.clip_grad_norm_(optimizer, max_norm)
                scaler.step(optimizer)
                scaler.update()
        assert audit.report.steps == 2
        return audit.report

    assert report(token_mean).exit_code == 0
    assert kinds(report(mean_of_means)) == ["microbatch_means"]
    assert kinds(report(divided, 100.0)) == ["microbatches_twice"]


@pytest.mark.parametrize(
    ("factor", "kind", "text"),
    [
        (2.0, "microbatches_never", "multiplied by the number of microbatches"),
        (2.0**12, "loss_scale", "2 ** 12"),
        (3.7, "", "multiplied by a constant: 3.7"),
    ],
)
def test_clipping_does_not_hide_factors(factor: float, kind: str, text: str) -> None:
    def too_large(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        token_mean(model, batches)
        scripts.divide(model, 1 / factor)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    report = audited(Labelled(), too_large, lambda model: clip_grad_norm_(model.parameters(), 0.01))
    assert scaler.is_enabled()
    assert kinds(report) == ([kind] if kind else []), str(report)
    assert report.exit_code == (1 if kind else 2)
    assert text in str(report)
    assert "right only after clipping" in str(report)


def test_clipped_sums_have_wrong_weights() -> None:
    """Means are expected, and weighted by other counts of labels."""

    def sums(model: nn.Module, batches: list[dict[str, Tensor]], added: int) -> None:
        for batch in batches:
            labels = (batch["labels"] != -100).sum()
            (model(**batch)["loss"] * labels * (labels + added)).backward()

    def clip(model: nn.Module) -> None:
        clip_grad_norm_(model.parameters(), 0.1)

    def clamp_other_values_and_clip(model: nn.Module) -> None:
        torch.ones(2).clamp_(max=0.5)
        clip(model)

    for added, clips in itertools.product((0, 1), (clip, clamp_other_values_and_clip)):
        report = audited(Labelled(), functools.partial(sums, added=added), clips)
        assert kinds(report) == ["weighted"], str(report)


def test_other_gradients_are_unexplained() -> None:
    def add_noise(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad += 0.1 * torch.randn_like(parameter)

    assert kinds(audited(Labelled(), token_mean, add_noise)) == ["unexplained"]


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_clipping_by_other_norms(norm_type: float) -> None:
    def clip(model: nn.Module, max_norm: float = 0.01) -> None:
        clip_grad_norm_(model.parameters(), max_norm, norm_type)

    for limit in (clip, functools.partial(clip, max_norm=1e6)):
        assert audited(Labelled(), token_mean, limit).exit_code == 0
        assert kinds(audited(Labelled(), mean_of_means, limit)) == ["microbatch_means"]


def test_random_numbers_of_forwards_are_drawn_again() -> None:
    """Those of Python, too, and in the dtype of the activations."""

    def drop_samples(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * (0.7 + torch.rand(len(output), 1, 1, dtype=output.dtype)).floor()

    def drop_layer(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * (random.random() < 0.7)

    seed_all(1)
    model = Labelled()
    model.model.norm.register_forward_hook(drop_samples)
    model.model.linear.register_forward_hook(drop_layer)
    for _ in range(4):
        right, wrong = audited(model, token_mean), audited(model, mean_of_means)
        assert right.exit_code == 0, str(right)
        assert kinds(wrong) == ["microbatch_means"], str(wrong)


def test_random_numbers_of_an_own_generator_are_not_decided() -> None:
    generator = torch.Generator().manual_seed(0)

    def drop(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * (torch.rand(output.shape, generator=generator) < 0.5) * 2

    model = Labelled()
    model.model.norm.register_forward_hook(drop)
    report = audited(model, mean_of_means)
    assert (kinds(report), report.exit_code) == ([], 2)
    assert "draw random numbers only from default" in report.undecided[0]


@pytest.mark.parametrize("function", [F.linear_cross_entropy, F.mse_loss])
def test_losses_count_by_label_and_weight(function: Any) -> None:
    """Without `ignore_index`, and with weights of elements."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    inputs = torch.randn(2, 12, 4)
    kept = torch.arange(12) < torch.tensor([[2], [11]])
    labels, weights = torch.where(kept, 1, -100), kept[..., None].expand(inputs.shape).float()

    def loss(outputs: Tensor, index: int, reduction: str) -> Tensor:
        if function is F.linear_cross_entropy:
            arguments = (torch.ones(5, 4).cumsum(0).sin(), labels[index])
            return function(outputs, *arguments, reduction=reduction)
        return function(outputs, inputs[index], weight=weights[index], reduction=reduction)

    def audited_losses(reduction: str, divisor: float) -> AuditReport:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with distmp.audit(model, optimizer) as audit:
            for index in range(2):
                outputs = model(inputs[index].repeat(1, 2))
                (loss(outputs, index, reduction) / divisor).backward()
            optimizer.step()
        return audit.report

    counted = kept if function is F.linear_cross_entropy else weights
    assert audited_losses("sum", float(counted.sum())).exit_code == 0
    model.zero_grad()
    assert kinds(audited_losses("mean", 2)) == ["microbatch_means"]


def test_clipping_of_scaled_gradients() -> None:
    def scaled(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        token_mean(model, batches)
        scripts.divide(model, 2.0**-12)

    def clip_too_early(model: nn.Module) -> None:
        clip_grad_norm_(model.parameters(), 100.0)  # above the norm of the unscaled gradient
        scripts.divide(model, 2.0**12)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    report = audited(Labelled(), scaled, clip_too_early)
    assert scaler.is_enabled()
    assert kinds(report) == ["loss_scale"]
    assert "clipped before it was unscaled: to max_norm / 2 ** 12" in report.mismatches[0][1]


def test_parts_that_are_clipped_separately_are_not_decided() -> None:
    def clip_some(model: nn.Module) -> None:
        clip_grad_norm_([*model.parameters()][:2], 0.01)

    def clip_each(model: nn.Module) -> None:
        for parameter in model.parameters():
            clip_grad_norm_(parameter, 0.01)

    def clip_one(model: nn.Module) -> None:
        clip_grad_norm_(model.model.embedding.parameters(), 0.01)
        clip_grad_norm_([*model.parameters()][1:], 1e9)

    def clip_values(model: nn.Module) -> None:
        clip_grad_value_(model.parameters(), 0.01)  # imported before

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.01, 0.01)

    def adapt(model: nn.Module) -> None:
        for parameter in model.parameters():
            limit = parameter.detach().norm().clamp_(min=1e-3).mul_(0.01)
            factor = limit / parameter.grad.norm().clamp(min=1e-6)
            parameter.grad.copy_(parameter.grad * factor.clamp(max=1.0))

    def assign(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone().clamp_(-0.01, 0.01)

    for clip in (clip_some, clip_each, clip_one, clip_values, clamp, adapt, assign):
        report = audited(Labelled(), token_mean, clip)
        assert report.exit_code == 2
        assert "it is clipped in parts, by value or with others" in report.undecided[0]


def test_a_gradient_of_the_step_before() -> None:
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        for step in range(2):
            token_mean(model, microbatches(step))
            optimizer.step()
    ((kind, text),) = audit.report.mismatches
    assert kind == "accumulated_twice"
    assert "never removed" in text


def test_parameters_without_gradient_are_not_decided() -> None:
    model = Labelled()
    model.unused = nn.Linear(2, 2)
    report = audited(model, token_mean)
    assert (kinds(report), report.exit_code) == ([], 2)
    assert report.undecided == (
        "unused.bias: no gradient: unused, or cut off from the loss",
        "unused.weight: no gradient: unused, or cut off from the loss",
    )


def test_parameters_of_several_optimizers() -> None:
    model = Labelled()
    both = [
        torch.optim.SGD(parameters, lr=0.1)
        for parameters in ([*model.parameters()][:2], [*model.parameters()][2:])
    ]
    for audited_one in both:
        with distmp.audit(model, audited_one) as audit:
            for step in range(2):
                token_mean(model, microbatches(step))
                clip_grad_norm_(model.parameters(), 0.1)
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
        assert audit.report.exit_code == 0, str(audit.report)


def test_optimizer_of_another_model_decides_nothing() -> None:
    model, other = Labelled(), torch.optim.SGD(Labelled().parameters(), lr=0.1)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, other) as audit:
        for step in range(2):
            mean_of_means(model, microbatches(step))
            other.step()
            own.step()
            own.zero_grad()
    assert audit.report.exit_code == 2
    assert "optimizer: holds no trained parameter of this model" in audit.report.undecided


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [([], "'list': pass one optimizer of torch"), (None, r"call trainer\.create_optimizer\(\)")],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message), distmp.audit(Labelled(), optimizer):
        pass


def test_engine_with_master_weights_is_not_decided() -> None:
    engine = distmp.Engine(
        nn.Linear(4, 1),
        lambda module, batch: (module(batch).square().sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy="bf16",
    )
    with distmp.audit(engine.module, engine.optimizer) as audit:
        engine.step([torch.ones(2, 4)])
    assert "audit an engine with the policy fp32" in audit.report.undecided[0]
    message = r"model = 'Engine': .*pass engine\.module and engine\.optimizer"
    with pytest.raises(ConfigError, match=message), distmp.audit(engine, engine.optimizer):  # type: ignore[arg-type]
        pass


def test_a_parameter_in_no_optimizer_is_named() -> None:
    model = Labelled()
    optimizer = torch.optim.SGD(model.model.head.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        token_mean(model, microbatches(0))
        optimizer.step()
    ((kind, text),) = audit.report.mismatches
    assert kind == "in_no_optimizer"
    assert "model.linear.weight" in text
    assert "head" not in text


def test_a_closure_is_part_of_the_step() -> None:
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        optimizer.step(lambda: token_mean(model, microbatches(0)))
        optimizer.zero_grad()
        optimizer.step(closure=lambda: mean_of_means(model, microbatches(1)))
    assert audit.report.steps == 2
    assert kinds(audit.report) == ["weighted"]


def test_accelerate_divides_by_the_accumulation_steps(fresh_accelerator: Any) -> None:
    """The example of accelerate for gradient accumulation, with labels of different lengths."""
    accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared: Any = accelerator.prepare(model, optimizer)
    with distmp.audit(*prepared) as audit:
        for batch in (*microbatches(0), *microbatches(1)):
            with accelerator.accumulate(prepared[0]):
                accelerator.backward(prepared[0](**batch)["loss"])
                prepared[1].step()
                prepared[1].zero_grad()
    assert audit.report.steps == 2
    assert kinds(audit.report) == ["microbatch_means"]


@pytest.mark.parametrize("policy", ["fp32", "bf16-autocast,keep_fp32=norm", "fp16-autocast"])
def test_accelerate_with_distmp_is_audited(fresh_accelerator: Any, policy: str) -> None:
    """Its casts of inputs and outputs do not apply to gradients in float64."""
    from distmp.integrations.accelerate import Accelerator

    accelerator = Accelerator(policy, cpu=True, gradient_accumulation_steps=2)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with distmp.audit(model, optimizer) as audit:
        for samples in (4, 1, 4, 1):
            with accelerator.accumulate(model):
                logits = model(torch.randn(samples, 8))
                accelerator.backward(F.cross_entropy(logits, torch.arange(samples)))
                optimizer.step()
                optimizer.zero_grad()
    assert kinds(audit.report) == ["microbatch_means"], str(audit.report)
    accelerator.end_training()


def test_a_model_that_is_not_called_is_named() -> None:
    """As a LightningModule whose training_step calls a part of it."""
    model = nn.ModuleDict({"net": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def report(audited_part: nn.Module) -> AuditReport:
        with distmp.audit(audited_part, optimizer) as audit:
            optimizer.zero_grad()
            F.cross_entropy(model["net"](torch.randn(2, 8)), torch.arange(2)).backward()
            optimizer.step()
        return audit.report

    assert report(model["net"]).exit_code == 0
    (text,) = report(model).undecided
    assert "it was not called; pass the part of the model that is" in text


def test_steps_that_are_all_skipped_are_not_decided() -> None:
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with distmp.audit(model, optimizer) as audit:
        (scaler.scale(model(**microbatches(0)[0])["loss"]) * 2.0**20).backward()
        scaler.step(optimizer)
    assert audit.report.undecided[0].startswith("optimizer: has skipped all 1 steps")


def test_what_is_not_seen_is_not_decided() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        optimizer.step()
    assert audit.report.exit_code == 2
    assert "pass loss_sum" in audit.report.undecided[0]
    with distmp.audit(model, optimizer) as audit:
        pass
    assert "optimizer: has not been called" in str(audit.report)


@ranks(2)
def test_steps_of_two_ranks() -> None:
    report = audited(DistributedDataParallel(Labelled()), token_mean)
    assert (report.exit_code, report.ranks) == (0, 2)
    assert any(name.startswith("allreduce, float32") for name in report.collectives)
    report = audited(DistributedDataParallel(Labelled()), mean_of_means)
    assert kinds(report) == ["microbatch_means"]
    assert kinds(audited(Labelled(), token_mean)) == ["own_rank", "different_weights"]
    sharded = fully_shard(Labelled())
    assert audited(sharded, token_mean).exit_code == 0
    assert kinds(audited(sharded, mean_of_means)) == ["microbatch_means"]


@ranks(2)
@pytest.mark.parametrize("elements", [0, 2**17])
def test_padded_inputs_are_compared_in_full(elements: int) -> None:
    model = DistributedDataParallel(nn.Linear(1, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        for step in range(2):
            optimizer.zero_grad()
            inputs = torch.zeros(2**17 + 1, 1)
            inputs[elements] = 2 * step + dist.get_rank()
            F.cross_entropy(model(inputs), torch.zeros(len(inputs)).long()).backward()
            optimizer.step()
    assert audit.report.exit_code == 0, str(audit.report)


class ReadsArrays(nn.Linear):
    def forward(self, array: np.ndarray) -> Tensor:
        return super().forward(torch.from_numpy(array).to(self.weight.dtype))


@ranks(2)
def test_weights_and_arrays_are_compared_in_full() -> None:
    """Those of ranks differ only at the end."""
    model = ReadsArrays(2**17, 2, bias=False)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.weight[1, -1], dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(model, optimizer) as audit:
        array = np.ones((2, 2**17), dtype=np.float32)
        array[1, -1] += dist.get_rank()
        F.cross_entropy(model(array), torch.zeros(2).long()).backward()
        optimizer.step()
    assert kinds(audit.report) == ["own_rank", "different_weights"]


@ranks(2)
def test_ranks_with_the_same_inputs() -> None:
    def rank_0(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        shared = [batches]
        dist.broadcast_object_list(shared)
        token_mean(model, shared[0])

    report = audited(DistributedDataParallel(Labelled()), rank_0)
    assert report.mismatches == (
        (
            "same_data",
            "inputs: ranks 0-1 have the same inputs in every step; fix: use DistributedSampler",
        ),
    )


def test_a_compiled_model_is_not_decided() -> None:
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.compile(backend="eager")
    with unchanged(model, optimizer), distmp.audit(model, optimizer) as audit:
        optimizer.step()
    assert (audit.report.exit_code, audit.report.steps) == (2, 0)
    assert audit.report.undecided == ("model: is compiled; audit it without torch.compile",)
    with distmp.audit(torch.compile(Labelled(), backend="eager"), optimizer) as audit:
        pass
    assert "compiled" in str(audit.report)


def test_optimizers_inside_of_backward_are_not_decided() -> None:
    """One optimizer per parameter, as in torch's tutorial; the script passes one of them."""
    model = Labelled()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    with distmp.audit(model, next(iter(optimizers.values()))) as audit:
        mean_of_means(model, microbatches(0))
    assert (audit.report.exit_code, audit.report.mismatches) == (2, ())
    assert "inside of backward" in audit.report.undecided[0]
    # Here the hooks only look at gradients.
    seen: list[Tensor] = []
    model = Labelled()
    model.model.head.weight.register_post_accumulate_grad_hook(seen.append)
    assert audited(model, token_mean).exit_code == 0


@pytest.mark.parametrize(("code", "by_iteration"), [(0, False), (1, False), (2, True)])
def test_a_scheduler_that_moves_on_after_a_skipped_step(code: int, by_iteration: bool) -> None:
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not by_iteration:
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with distmp.audit(model, optimizer) as audit:
        for step in range(3):
            optimizer.zero_grad()
            token_mean(model, microbatches(step))
            for parameter in model.parameters():
                parameter.grad *= scaler.get_scale() * (torch.inf if step == 1 else 1)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            if by_iteration:
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
            elif step != 1 or code:
                scheduler.step()
    assert (audit.report.exit_code, audit.report.steps) == (code, 2), str(audit.report)
    if code == 1:
        ((kind, text),) = audit.report.mismatches
        assert kind == "scheduler"
        assert text == (
            "learning rate: the learning rate changed after a skipped step: "
            "[0.05625] at it, then [0.0625]; fix: step it with the optimizer"
        )


@ranks(4)
def test_a_mesh_of_replicas_and_shards_has_no_finding() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = Labelled(tied=True)
    fully_shard(model.model.linear, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    report = audited(model, token_mean)
    assert (report.exit_code, report.ranks, report.steps) == (0, 4, 2), str(report)
    assert kinds(audited(model, mean_of_means)) == ["microbatch_means"]
    model = scripts.make_model()
    fully_shard(model.linear, mesh=mesh)
    check_gradient(scripts.fsdp2, fully_shard(model, mesh=mesh), scripts.samples())


@ranks(2)
def test_microbatches_reduced_in_16_bits_and_summed_in_fp32() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    report = audited(fully_shard(Labelled(), mp_policy=policy), token_mean)
    assert kinds(report) == ["reduced_in_16_bits"]
    assert "reduce_scatter" in report.mismatches[0][1]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    report = audited(fully_shard(Labelled(), mp_policy=policy), token_mean)
    assert report.exit_code == 0, str(report)

    def with_counts(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        token_mean(model, batches)
        dist.all_reduce(torch.zeros(64, dtype=torch.float16))

    report = audited(DistributedDataParallel(Labelled()), with_counts)
    assert report.exit_code == 0, str(report)


@ranks(2)
def test_a_step_that_one_rank_skips() -> None:
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with distmp.audit(model, optimizer) as audit:
        for step in range(2):
            optimizer.zero_grad()
            for batch in microbatches(step):
                scaler.scale(model(**batch)["loss"]).backward()
            if (dist.get_rank(), step) == (1, 0):
                model.model.head.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    assert "skipped" in kinds(audit.report)
    assert "[(2, 0), (1, 1)]" in str(audit.report)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_replaced_forward_that_calls_the_original_model(wrapped: bool) -> None:
    model = Labelled()
    original = model.forward

    def forward(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return original(input_ids, labels)

    model.forward = functools.wraps(type(model).forward)(forward) if wrapped else forward
    report = audited(model, token_mean)
    assert report.exit_code == 0, str(report)
    assert kinds(audited(model, mean_of_means)) == ["microbatch_means"]


def test_loss_sum_gets_the_arguments_of_forward() -> None:
    """A keyword beside positional arguments, too."""

    def loss_sum(model: nn.Module, batch: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, Any]:
        inputs, keywords = batch
        tokens = (keywords["labels"] != -100).sum()
        return model(inputs, **keywords)["loss"] * tokens, tokens

    def mixed(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        for batch in batches:
            loss, _ = loss_sum(model, (batch["input_ids"], {"labels": batch["labels"]}))
            (loss / total(batches)).backward()

    for backward, text in (
        (mixed, ""),
        (outside, "loss_sum gets the arguments of forward, so pass labels to it; it got int64 ["),
    ):
        model = Labelled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        audited_model = model if backward is mixed else model.model
        with distmp.audit(audited_model, optimizer, loss_sum=loss_sum) as audit:
            backward(model, microbatches(0))
            optimizer.step()
        assert audit.report.exit_code == 2 * bool(text), str(audit.report)
        assert text in str(audit.report)


def outside(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    """The model does not get the labels."""
    for batch in batches:
        pair = batch["input_ids"], batch["labels"]
        scripts.cross_entropy(model.model, pair, "sum").backward()


def test_a_loss_of_another_model_is_not_decided() -> None:
    model, other = Labelled(), Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmp.audit(
        model, optimizer, loss_sum=lambda _, batch: (other(**batch)["loss"], 1)
    ) as audit:
        token_mean(model, microbatches(0))
        optimizer.step()
    assert audit.report.exit_code == 2
    assert "does not depend on the parameters" in audit.report.undecided[0]


@ranks(2)
def test_clipping_before_the_reduction() -> None:
    def clipped(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        token_mean(model, batches)
        clip_grad_norm_(model.parameters(), 0.05)
        scripts.all_reduce(model)
        scripts.divide(model, scripts.ranks())

    report = audited(Labelled(), clipped)
    assert "clipped" in kinds(report), str(report)
    assert "the part of each rank alone" in str(report)


@pytest.mark.parametrize("last", [True, False])
def test_a_forward_that_is_only_looked_at_is_not_decided(last: bool) -> None:
    def looked_at(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        model(**batches[0])["loss"].item()
        token_mean(model, batches)
        if last:
            model(**batches[0])

    report = audited(Labelled(dropout=0.2), looked_at)
    assert (kinds(report), report.exit_code) == ([], 2)
    (text,) = report.undecided
    assert text.startswith(f"model: {4 if last else 2} forwards without backward")

    def and_wrong(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        model(**batches[0])
        mean_of_means(model, batches)

    assert kinds(audited(Labelled(), and_wrong)) == ["microbatch_means"]


def test_accelerate_in_bf16_is_audited(fresh_accelerator: Any) -> None:
    accelerator = fresh_accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Labelled())
    assert audited(model, token_mean).exit_code == 0
    assert kinds(audited(model, mean_of_means)) == ["microbatch_means"]
