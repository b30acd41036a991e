from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.memory import LiveStorages
from distmp.engine.divergence_guard import DivergenceConfig
from distmp.engine.engine import Engine
from distmp.engine.outcome import StepNumbers
from distmp.errors import CheckpointError, ConfigError, TrainingError
from distmp.optim import AdamW
from distmp.precision import PrecisionPolicy
from distmp.scaling.settings import LossScaleConfig
from distmp.utils.tensor_trees import checksum
from tests.ranks import in_turn, ranks, same_on_all_ranks
from tests.recording import Collectives, HostReads
from tests.reference import (
    CLASSES,
    INPUTS,
    ONE_RANK,
    PLAIN,
    TWO_RANKS,
    Batch,
    adagrad,
    adamw,
    assert_same_bits,
    error,
    foreach_adamw,
    fused_adagrad,
    fused_adamw,
    fused_sgd,
    gathered,
    loss,
    make_engine,
    make_model,
    microbatches,
    plain_sgd,
    plain_training,
    samples,
    sgd,
    snapshot,
    sum_of_squares,
    train,
    trained,
    weights,
)

OPTIMIZERS = (fused_adamw, foreach_adamw, fused_sgd, sgd, fused_adagrad, adagrad)

# FP32 arithmetic with a loss scale: changing the scale by a power of two changes no bit.
SCALED = PrecisionPolicy("scaled", loss_scale="dynamic")

StepBatches = list[Batch]


def bad_batches(step: int, factor: float = math.inf) -> StepBatches:
    """Return four microbatches; the third makes the gradient non-finite."""
    batches = microbatches(step, ONE_RANK[0])
    batches[2] = batches[2]._replace(factor=factor)
    return batches


def empty_batches(step: int) -> StepBatches:
    return microbatches(step, ((0, 0),))


def same_numbers(one: StepNumbers, other: StepNumbers) -> bool:
    return repr(one) == repr(other)  # unlike ==, NaN equals NaN


# The arithmetic of a step


@pytest.mark.parametrize("max_norm", [None, 1.3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_plain_torch(
    optimizer: Callable[[Any], torch.optim.Optimizer], max_norm: float | None
) -> None:
    engine = make_engine(optimizer=optimizer, max_norm=max_norm)
    numbers = train(engine, 20, ONE_RANK)
    plain = PLAIN.get(optimizer, optimizer)
    expected, losses_and_norms = plain_training(20, ONE_RANK, plain, max_norm)
    assert error(weights(engine), expected) < 1e-5
    found = [(step.loss, step.grad_norm) for step in numbers]
    assert torch.allclose(torch.tensor(found), torch.tensor(losses_and_norms), rtol=3e-6)
    assert [step.weight for step in numbers] == [sum(sizes[0]) for sizes in ONE_RANK] * 5
    if max_norm is not None:
        clipped = [norm > max_norm for _, norm in losses_and_norms]
        assert any(clipped)
        assert not all(clipped)


def test_gradient_is_that_of_the_global_mean_not_a_mean_of_means() -> None:
    engine = make_engine()
    uneven = microbatches(0, ((15, 1),))
    means = [
        torch.autograd.grad(
            loss(engine.module, batch)[0] / len(batch.labels), engine.module.head.weight
        )[0]
        for batch in uneven
    ]
    engine.step(uneven)
    gradient = engine.module.head.weight.grad
    assert gradient is not None
    expected = (15 * means[0] + means[1]) / 16
    assert torch.allclose(gradient, expected, atol=1e-6)
    assert not torch.allclose(gradient, (means[0] + means[1]) / 2, atol=1e-2)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_nominal_weight_changes_no_bit(policy: str) -> None:
    engines = [make_engine(policy=policy, nominal_weight=weight) for weight in (1, 700)]
    for engine in engines:
        train(engine, 5, ONE_RANK)
    assert [engine.nominal_weight for engine in engines] == [1, 1024]
    assert_same_bits(weights(engines[1]), weights(engines[0]))


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("fp16", fused_adamw), ("bf16-pure", lambda named: AdamW(named, lr=0.1))],
)
def test_default_dtype_of_torch_changes_no_bit(policy: str, optimizer: Any) -> None:
    steps = [microbatches(step, [[4, 3]]) for step in range(4)]
    states = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = make_model()
        torch.set_default_dtype(dtype)
        try:
            schedule = lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7)  # noqa: E731
            engine = make_engine(model=model, policy=policy, optimizer=optimizer, schedule=schedule)
            for batches in steps:
                engine.step(batches)
        finally:
            torch.set_default_dtype(torch.float32)
        states.append(snapshot(engine))
    assert_same_bits(states[1], states[0])


def test_nominal_weight_is_that_of_the_first_step_with_any_weight() -> None:
    engine, reference = make_engine(), make_engine(nominal_weight=16)
    for one in (engine, reference):
        assert one.step([samples(0, 0), samples(0, 0)]).numbers.skipped
    assert engine.nominal_weight is None
    for one in (engine, reference):
        one.step([samples(1, 8), samples(2, 8)])
    assert engine.nominal_weight == 16
    assert_same_bits(weights(engine), weights(reference))


def test_nominal_weight_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nominal_weight = 0: use a finite number above 0"):
        make_engine(nominal_weight=0)


def test_nominal_weight_is_that_of_the_first_step() -> None:
    engine = make_engine()
    train(engine, 1, (((5, 5, 5),),))
    assert engine.nominal_weight == 16
    train(engine, 1, (((90,),),))
    assert engine.nominal_weight == 16


@pytest.mark.parametrize(
    "kind", [int, float, lambda n: torch.tensor(float(n)), torch.zeros((), dtype=torch.int64).fill_]
)
def test_weight_is_a_number_or_a_tensor(kind: Callable[[int], Any]) -> None:
    def typed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        total, weight = loss(model, batch)
        return total, kind(int(weight))

    engine = Engine(make_model(), typed_loss, fused_adamw, policy="fp32", device="cpu")
    train(engine, 3, ONE_RANK)
    reference = make_engine()
    train(reference, 3, ONE_RANK)
    assert_same_bits(weights(engine), weights(reference))


def test_bf16_policy_computes_in_bf16_and_trains_like_fp32() -> None:
    engine = make_engine(policy="bf16")
    seen = []
    engine.module.blocks[0].register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    train(engine, 20, ONE_RANK)
    expected, _ = plain_training(20, ONE_RANK)
    assert set(seen) == {torch.bfloat16}
    assert 1e-4 < error(weights(engine), expected) < 0.1


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-autocast", "fp16-autocast"])
def test_every_mixed_policy_learns(policy: str) -> None:
    engine = make_engine(policy=policy)
    labelled = samples(0, 16)
    numbers = [engine.step([labelled]).numbers for _ in range(40)]
    assert numbers[-1].loss < 0.5 * numbers[0].loss
    assert all(weight.dtype == torch.float32 for weight in weights(engine).values())
    scale = 65536 if policy.startswith("fp16") else 1
    assert numbers[0].loss_scale == scale


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_parameters_in_another_memory_order(policy: str, fused: bool) -> None:
    def total(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        images, labels = batch
        return F.cross_entropy(model(images).flatten(1), labels, reduction="sum"), len(labels)

    def trained_model(memory_format: torch.memory_format) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 2))
        model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizer = functools.partial(adamw, fused=fused)
        engine = make_engine(model=model, loss=total, optimizer=optimizer, policy=policy)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(8, 3, 4, 4, generator=generator)
            engine.step([(images, torch.randint(5, (8,), generator=generator))])
        return engine.module

    contiguous = trained_model(torch.contiguous_format)
    channels_last = trained_model(torch.channels_last)
    first = channels_last[0].weight  # type: ignore[index]
    assert first.is_contiguous(memory_format=torch.channels_last)
    tolerance = 1e-5 if policy == "fp32" else 1e-2
    for found, expected in zip(channels_last.parameters(), contiguous.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=tolerance)


def test_stop_request_shows_in_the_outcome() -> None:
    engine = make_engine()
    batches = microbatches(0, ONE_RANK[0])
    assert not engine.step(batches).numbers.stop
    assert engine.step(batches, stop=True).numbers.stop
    assert not engine.step(batches).numbers.stop
    with pytest.raises(ConfigError, match="stop = 'no': use True or False"):
        engine.step(batches, stop="no")  # type: ignore[arg-type]


def test_step_without_microbatch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one microbatch"):
        make_engine().step([])


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model = 'Tanh': has no parameter"):
        Engine(nn.Tanh(), loss, fused_adamw, device="cpu")


def test_outcome_contains_scheduled_learning_rate() -> None:
    engine = make_engine(schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    rates = [step.learning_rate for step in train(engine, 5, ONE_RANK)]
    assert rates == pytest.approx([1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3])


# Skipped steps


@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("spoil", [bad_batches, empty_batches])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skipped_step_changes_no_state(
    optimizer: Callable[[Any], torch.optim.Optimizer],
    spoil: Callable[[int], StepBatches],
    when: int,
) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def scaled_engine() -> Engine:
        return make_engine(optimizer=optimizer, policy=SCALED, schedule=schedule, max_norm=1.3)

    engine, reference = scaled_engine(), scaled_engine()
    train(engine, when, ONE_RANK)
    before = snapshot(engine)
    skipped = engine.step(spoil(99)).numbers
    if when > 0:  # some optimizers create their state in the first step
        assert_same_bits(trained(snapshot(engine)), trained(before))
    else:
        assert_same_bits(weights(engine), weights(reference))
    train(engine, 6 - when, ONE_RANK, first=when)
    last = train(engine, 1, ONE_RANK, first=6)[0]
    expected = train(reference, 7, ONE_RANK)[-1]
    assert_same_bits(trained(snapshot(engine)), trained(snapshot(reference)))

    overflow = spoil is bad_batches
    assert skipped.skipped
    assert skipped.overflow == overflow
    assert (skipped.applied_total, skipped.skipped_total, skipped.skipped_in_a_row) == (when, 1, 1)
    assert (last.applied_total, last.skipped_total, last.skipped_in_a_row) == (7, 1, 0)
    assert last.learning_rate == expected.learning_rate
    assert skipped.loss_scale == 65536
    assert last.loss_scale == (32768 if overflow else 65536)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_that_starts_later_is_zero_after_a_skipped_step(momentum: float) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=momentum, fused=True)
    engines = [make_engine(optimizer=optimizer) for _ in range(2)]
    for engine in engines:
        train(engine, 1, ONE_RANK)
        engine.optimizer.state.clear()
        engine.optimizer.param_groups[0]["momentum"] = 0.9
    with mock.patch.object(torch, "empty_like", partial(torch.full_like, fill_value=math.nan)):
        assert engines[0].step(bad_batches(0)).numbers.skipped
    for engine in engines:
        train(engine, 2, ONE_RANK, first=1)
    assert_same_bits(trained(snapshot(engines[0])), trained(snapshot(engines[1])))


@pytest.mark.parametrize("steps", [0, 2])
def test_dampening_that_is_set_later_is_refused_without_momentum(steps: int) -> None:
    fused, plain = (make_engine(optimizer=each) for each in (fused_sgd, sgd))
    for engine in (fused, plain):
        train(engine, steps, ONE_RANK)
        engine.optimizer.param_groups[0]["dampening"] = 0.5
    if steps:
        for engine in (fused, plain):
            train(engine, 2, ONE_RANK, first=steps)
        assert error(weights(fused), weights(plain)) < 1e-6
        fused.optimizer.state.clear()
    with pytest.raises(ConfigError, match=r"dampening = 0\.5: .* set fused to false"):
        train(fused, 1, ONE_RANK)
    fused.optimizer.param_groups[0]["dampening"] = 0.0
    train(fused, 1, ONE_RANK)


@pytest.mark.parametrize("factor", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-autocast", "fp16"])
def test_every_policy_skips_nonfinite_gradients(policy: str, factor: float) -> None:
    engine = make_engine(policy=policy)
    train(engine, 2, ONE_RANK)
    before = trained(snapshot(engine))
    published = [parameter.clone() for parameter in engine.module.parameters()]
    numbers = engine.step(bad_batches(2, factor)).numbers
    assert numbers.skipped
    assert numbers.overflow
    assert not math.isfinite(numbers.grad_norm)
    assert_same_bits(trained(snapshot(engine)), before)
    assert all(map(torch.equal, engine.module.parameters(), published))
    assert not train(engine, 1, ONE_RANK)[0].skipped


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1.0])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [1e-25, 1e20, 3e38])
def test_finite_gradients_of_any_size_are_applied(
    size: float, fused: bool, max_norm: float | None
) -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    gradient = size * torch.linspace(-1, 1, 16).view(4, 4)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, fused=fused)

    engine = Engine(
        model,
        lambda model, factor: ((model.weight * gradient).sum() * factor, 1),
        optimizer,
        policy="fp32",
        max_norm=max_norm,
        device="cpu",
    )
    numbers = engine.step([1.0]).numbers
    exact = gradient.double()
    clip = 1.0 if max_norm is None else min(1.0, max_norm / float(exact.norm() + 1e-6))
    assert not numbers.skipped
    assert numbers.grad_norm == pytest.approx(exact.norm().item(), rel=1e-6, abs=0)
    torch.testing.assert_close(model.weight.double(), -clip * exact, rtol=1e-6, atol=0)


def test_step_with_nonfinite_loss_weight_is_skipped() -> None:
    def total(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        return loss(model, batch)[0], math.nan

    engine = Engine(make_model(), total, fused_adamw, policy="fp32", device="cpu", nominal_weight=1)
    assert train(engine, 1, ONE_RANK)[0].skipped
    assert_same_bits(weights(engine), weights(make_engine()))


def test_fp16_loss_scale_grows_until_overflow() -> None:
    engine = make_engine(
        policy="fp16", loss_scale=LossScaleConfig(init=2.0**24, growth_interval=10)
    )
    batches = [batch._replace(factor=8.0) for batch in microbatches(0, ONE_RANK[0])]
    numbers = [engine.step(batches).numbers for _ in range(60)]
    falling = next(index for index, step in enumerate(numbers) if not step.skipped)
    assert falling > 2
    assert [step.loss_scale for step in numbers[: falling + 1]] == [
        2.0 ** (24 - index) for index in range(falling + 1)
    ]
    highest = numbers[falling].loss_scale
    grown = [step.loss_scale for step in numbers[falling : falling + 11]]
    assert grown == [highest] * 10 + [2 * highest]
    assert numbers[-1].loss < numbers[falling].loss
    assert numbers[-1].applied_total + numbers[-1].skipped_total == 60


def test_scale_stays_within_its_limits() -> None:
    rules = LossScaleConfig(init=4, min_scale=2, max_scale=8, growth_interval=1)
    engine = make_engine(policy="fp16", loss_scale=rules)
    falling = [engine.step(bad_batches(step)).numbers.loss_scale for step in range(4)]
    assert falling == [4, 2, 2, 2]
    assert [step.loss_scale for step in train(engine, 4, ONE_RANK)] == [2, 4, 8, 8]


def test_skips_in_a_row_are_counted() -> None:
    engine = make_engine()
    kinds = (empty_batches, bad_batches, bad_batches)
    in_a_row = [engine.step(kind(0)).numbers.skipped_in_a_row for kind in kinds]
    assert in_a_row == [1, 2, 3]
    assert train(engine, 1, ONE_RANK)[0].skipped_in_a_row == 0
    assert engine.step(bad_batches(0)).numbers.skipped_total == 4


# Failed and skipped steps leave no trace


class FaultyError(Exception):
    pass


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_abandoned_step_leaves_no_state(policy: str) -> None:
    def faulty_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        total, weight = loss(model, batch)
        if math.isnan(batch.factor):
            raise FaultyError
        return total, weight

    engine = Engine(make_model(), faulty_loss, fused_adamw, policy=policy, device="cpu")
    reference = make_engine(policy=policy)
    for one in (engine, reference):
        train(one, 2, ONE_RANK)
    broken = bad_batches(50, math.nan)
    broken[0] = broken[0]._replace(factor=math.inf)  # accumulated before the fault
    with pytest.raises(FaultyError):
        engine.step(broken)
    for one in (engine, reference):
        train(one, 2, ONE_RANK, first=2)
    assert_same_bits(trained(snapshot(engine)), trained(snapshot(reference)))


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_steps_changes_nothing(set_to_none: bool, policy: str) -> None:
    engine, reference = make_engine(policy=policy), make_engine(policy=policy)
    for step in range(4):
        train(engine, 1, ONE_RANK, first=step)
        engine.module.zero_grad(set_to_none=set_to_none)
        engine.optimizer.zero_grad(set_to_none=set_to_none)
    train(reference, 4, ONE_RANK)
    assert_same_bits(weights(engine), weights(reference))


# One decision for all ranks


class Spoilable(nn.Module):
    """A classifier with a bias; single elements of its gradient can be made non-finite.

    Under FSDP each element of the bias is on one rank only, and no other gradient depends on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.classifier = make_model()
        self.bias = nn.Parameter(torch.zeros(CLASSES))
        self.factors = torch.ones(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.clone()
        if bias.requires_grad:
            bias.register_hook(lambda gradient: gradient * self.factors)
        return self.classifier(x) + bias


@ranks(2)
@in_turn("optimizer", [fused_adamw, foreach_adamw, fused_sgd])
@in_turn("strategy", ["ddp", "fsdp"])
def test_overflow_on_one_rank_is_skipped_by_all_ranks(
    strategy: str, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    def new_engine() -> Engine:
        return make_engine(
            model=Spoilable(),
            strategy=strategy,
            optimizer=optimizer,
            policy=SCALED,
            schedule=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
        )

    engine, reference = new_engine(), new_engine()
    for one in (engine, reference):
        train(one, 2, TWO_RANKS)
    before = trained(snapshot(engine))
    spoilers = [(1, math.inf, -1), (0, math.nan, -1), (0, -math.inf, 0)]
    for count, (rank, factor, element) in enumerate(spoilers, start=1):
        if dist.get_rank() == rank:
            engine.module.factors[element] = factor
        (numbers,) = train(engine, 1, TWO_RANKS, first=50 + count)
        engine.module.factors.fill_(1)
        assert (numbers.overflow, numbers.skipped) == (True, True)
        assert (numbers.applied_total, numbers.skipped_total) == (2, count)
        assert numbers.loss_scale == 2.0 ** (17 - count)
        assert same_on_all_ranks(numbers)
        assert_same_bits(trained(snapshot(engine)), before)
    found = train(engine, 3, TWO_RANKS, first=2)
    expected = train(reference, 3, TWO_RANKS, first=2)
    assert [step.learning_rate for step in found] == [step.learning_rate for step in expected]
    assert [step.loss_scale for step in found] == [2.0**13] * 3
    assert found[-1].applied_total == 5
    assert_same_bits(trained(snapshot(engine)), trained(snapshot(reference)))
    assert same_on_all_ranks([value.tolist() for value in snapshot(engine).values()])


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_scale_stays_the_same_on_all_ranks_where_one_overflows_in_fp16(strategy: str) -> None:
    engine = make_engine(strategy=strategy, policy="fp16")
    overflows = []
    for step in range(12):
        batches = microbatches(step, TWO_RANKS[0], dist.get_rank())
        if dist.get_rank() == 1:  # a large loss; its gradient is too large only times the scale
            batches = [batch._replace(factor=1000.0) for batch in batches]
        numbers = engine.step(batches).numbers
        overflows.append(numbers.overflow)
        assert numbers.skipped == numbers.overflow
        assert same_on_all_ranks(numbers)
    assert overflows[:3] == [True] * 3
    assert overflows[-3:] == [False] * 3
    assert numbers.loss_scale == 65536 * 0.5 ** sum(overflows)
    assert same_on_all_ranks([value.tolist() for value in snapshot(engine).values()])
    full = gathered(dict(engine.module.named_parameters()))
    assert same_on_all_ranks([value.tolist() for value in full.values()])


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_step_without_samples_on_any_rank(strategy: str) -> None:
    engine = make_engine(strategy=strategy, policy=SCALED)
    train(engine, 2, TWO_RANKS)
    before = snapshot(engine)
    (numbers,) = train(engine, 1, (((0, 0), (0, 0)),))
    assert (numbers.skipped, numbers.overflow, numbers.weight) == (True, False, 0)
    after = snapshot(engine)
    assert after.pop("engine/counts").tolist() == [2, 1, 1]
    before.pop("engine/counts")
    assert_same_bits(after, before)
    assert not train(engine, 1, TWO_RANKS)[0].skipped


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_step_takes_one_all_reduce_besides_gradients(strategy: str) -> None:
    engine = make_engine(strategy=strategy, policy="bf16", max_norm=1.0)
    train(engine, 2, TWO_RANKS)
    batches = microbatches(2, TWO_RANKS[0], dist.get_rank())
    with Collectives() as collectives:
        engine.step(batches)
    of_fsdp = {"_allgather_base_", "alltoall_base_"}
    own = [name for name in collectives.names() if name not in of_fsdp]
    if strategy == "ddp":
        assert own == ["allreduce_"] * 2  # the one bucket, and the decision
        assert len(collectives.found) == 2
    else:
        assert own == ["allreduce_"]
        assert len(collectives.found) > 1


@ranks(2)
def test_a_stop_request_of_one_rank_reaches_all() -> None:
    engine = make_engine()
    batches = microbatches(0, TWO_RANKS[0], dist.get_rank())
    asked = [engine.step(batches, stop=dist.get_rank() == rank).numbers.stop for rank in (0, 1, 2)]
    assert asked == [True, True, False]


@ranks(2)
def test_evaluation_over_ranks_with_different_amounts() -> None:
    engine = make_engine()
    found = engine.evaluate(microbatches(3, ((5, 1, 9), (2,)), dist.get_rank()))
    batch = samples(3, 17)
    mean = F.cross_entropy(make_model().double()(batch.inputs.double()), batch.labels)
    assert found == pytest.approx(mean.item(), rel=1e-6)


# Evaluation


class Moded(nn.Module):
    """A model with a submodule that is always in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = make_model()
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(INPUTS).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.frozen(x)))


def test_evaluation_is_the_mean_over_all_samples_and_changes_nothing() -> None:
    model = Moded()
    engine = make_engine(model=model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = engine.evaluate(microbatches(3, ((5, 1, 9),)))
    batch = samples(3, 15)
    logits = make_model().double()(batch.inputs.double() / math.sqrt(1 + 1e-5))
    assert found == pytest.approx(F.cross_entropy(logits, batch.labels).item(), rel=1e-6)
    assert_same_bits(model.state_dict(), before)
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)


def test_evaluation_without_microbatches() -> None:
    for nothing in ([], iter(())):
        with pytest.raises(ConfigError, match=r"none on any rank': there is nothing .*loader.once"):
            make_engine().evaluate(nothing)
    assert math.isnan(make_engine().evaluate(empty_batches(0)))


# Saving and loading


@pytest.mark.parametrize("policy", [SCALED, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_state_continues_bit_by_bit(
    optimizer: Callable[[Any], torch.optim.Optimizer], policy: str | PrecisionPolicy
) -> None:
    def new_engine(seed: int) -> Engine:
        return make_engine(
            model=make_model(seed),
            optimizer=optimizer,
            policy=policy,
            schedule=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
            loss_scale=LossScaleConfig(growth_interval=3),
            max_norm=1.3,
        )

    engine, resumed = new_engine(0), new_engine(1)
    train(engine, 4, ONE_RANK)
    engine.step(bad_batches(4))
    train(engine, 1, ONE_RANK)
    resumed.load_state_dict(snapshot(engine))
    assert_same_bits(snapshot(resumed), snapshot(engine))
    expected = train(engine, 5, ONE_RANK, first=5)
    found = train(resumed, 5, ONE_RANK, first=5)
    assert_same_bits(snapshot(resumed), snapshot(engine))
    assert all(map(same_numbers, found, expected))


def test_state_before_the_first_step_can_be_loaded() -> None:
    engine, resumed = make_engine(), make_engine(model=make_model(1))
    resumed.load_state_dict(snapshot(engine))
    for one in (engine, resumed):
        train(one, 3, ONE_RANK)
    assert_same_bits(snapshot(resumed), snapshot(engine))


def test_names_and_types_of_the_state() -> None:
    engine = make_engine(policy="bf16")
    train(engine, 1, ONE_RANK)
    state = engine.state_dict()
    parameters = [name for name, _ in make_model().named_parameters()]
    moments = [
        f"optimizer/{name}/{key}"
        for name in parameters
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    scale = [f"loss_scale/{key}" for key in ("value", "clean_steps", "overflows_in_a_row")]
    bounds = ["divergence/seen", "divergence/values"]
    numbers = [f"engine/{key}" for key in ("counts", "nominal_weight", "seed")]
    own = [*scale, *bounds, *numbers, f"group/{checksum(sorted(parameters)):08x}/lr"]
    assert sorted(state) == sorted([*(f"model/{name}" for name in parameters), *moments, *own])
    assert {state[f"model/{name}"].dtype for name in parameters} == {torch.float32}


@pytest.mark.parametrize("name", ["model/head.weight", "engine/seed"])
def test_state_lacking_something_is_refused_and_so_are_later_steps(
    name: str, tmp_path: Path
) -> None:
    engine = make_engine()
    train(engine, 1, ONE_RANK)
    state = snapshot(engine)
    with pytest.raises(CheckpointError, match=rf"lacks {name}"):
        engine.load_state_dict({key: state[key] for key in state if key != name})
    for call in (lambda: train(engine, 1, ONE_RANK), lambda: engine.save(tmp_path)):
        with pytest.raises(TrainingError, match=r"or a state was loaded in part, .*engine\.load"):
            call()
    engine.load_state_dict(state)
    assert not train(engine, 1, ONE_RANK)[0].skipped


def test_state_that_an_option_makes_incomplete_changes_nothing() -> None:
    engine, strict = make_engine(), make_engine(optimizer=partial(adamw, amsgrad=True))
    train(engine, 1, ONE_RANK)
    train(strict, 1, ONE_RANK)
    before = snapshot(strict)
    with pytest.raises(CheckpointError, match="which amsgrad = True needs"):
        strict.load_state_dict(snapshot(engine))
    assert_same_bits(snapshot(strict), before)
    assert not train(strict, 1, ONE_RANK)[0].skipped


def test_rates_of_groups_with_other_parameters_are_not_loaded() -> None:
    def new_engine(first: float, second: float, reverse: bool = False) -> Engine:
        def build(named: Any) -> torch.optim.Optimizer:
            named = list(named)
            groups = [{"params": named[:2], "lr": first}, {"params": named[2:], "lr": second}]
            return torch.optim.SGD(groups[::-1] if reverse else groups, lr=0.1)

        return make_engine(optimizer=build)

    def rates(engine: Engine) -> list[float]:
        return [group["lr"] for group in engine.optimizer.param_groups]

    state = snapshot(new_engine(0.3, 0.5))
    for engine, expected in (
        (new_engine(0.1, 0.2), [0.3, 0.5]),
        (new_engine(0.1, 0.2, reverse=True), [0.5, 0.3]),
        (make_engine(optimizer=plain_sgd), [0.1]),
    ):
        engine.load_state_dict(state)
        assert rates(engine) == expected


def test_lost_numbers_of_groups_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)

    def apart(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [each]} for each in named], lr=0.1)

    engine = make_engine(optimizer=plain_sgd, schedule=schedule)
    engine.optimizer.param_groups[0]["weight_decay"] = 0.5
    make_engine(optimizer=apart, schedule=schedule).load_state_dict(snapshot(engine))
    assert "numbers of parameter groups with other parameters: group/" in caplog.text


def test_own_attributes_of_an_optimizer_stay() -> None:
    class Scaled(torch.optim.Optimizer):
        def __init__(self, named: Any) -> None:
            super().__init__(named, {"lr": 0.1})
            self.grad_scale = 2.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * self.grad_scale * parameter.grad

    engine = make_engine(optimizer=Scaled)
    train(engine, 2, ONE_RANK)


def test_nominal_weight_of_the_configuration_outlives_a_load() -> None:
    engine = make_engine(nominal_weight=64.0)
    engine.load_state_dict(snapshot(make_engine()))
    assert engine.nominal_weight == 64.0


def test_state_of_a_larger_model_is_refused() -> None:
    engine = make_engine()
    state = snapshot(engine)
    with pytest.raises(
        CheckpointError, match=r"holds model/more\.weight, which this model does not"
    ):
        engine.load_state_dict({**state, "model/more.weight": torch.ones(1)})
    engine.load_state_dict({**state, "of_a_callback": torch.ones(1)})


def test_invalid_state_is_refused_with_one_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    for state in ({}, engine.model.state_dict()):
        message = f"^the mapping of {len(state)} tensors is not a state of an engine; pass what"
        with pytest.raises(CheckpointError, match=message):
            engine.load_state_dict(state)
    assert not caplog.records


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(INPUTS, INPUTS, bias=False)
        self.two = nn.Linear(INPUTS, INPUTS, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("offset", torch.full((INPUTS,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x))) + self.offset


def test_tied_weights_keep_their_fp32_values_under_another_policy() -> None:
    low_precision, wide = (make_engine(model=Tied(), policy=policy) for policy in ("bf16", "fp32"))
    train(low_precision, 3, ONE_RANK)
    state = snapshot(low_precision)
    names = [name for name in state if name.startswith("model/")]
    assert names == ["model/one.weight", "model/offset"]
    wide.load_state_dict(state)
    assert torch.equal(wide.module.one.weight, state["model/one.weight"])
    assert not torch.equal(low_precision.module.one.weight.float(), state["model/one.weight"])


@pytest.mark.parametrize(
    ("saved", "loaded", "scale", "clean_steps"),
    [
        ("fp16", "fp16", 32768, 1),
        ("fp16", "bf16", 1, 1),
        ("bf16", "fp16", 4096, 0),
        ("fp32", "bf16", 1, 0),
    ],
)
def test_scale_under_another_policy(
    saved: str, loaded: str, scale: float, clean_steps: int
) -> None:
    engine = make_engine(policy=saved)
    engine.step(bad_batches(0))
    train(engine, 1, ONE_RANK)
    resumed = make_engine(policy=loaded, loss_scale=LossScaleConfig(init=4096))
    # Into the live tensors, like a checkpoint.
    state = resumed.state_dict()
    for name, value in snapshot(engine).items():
        if name in state:
            state[name].copy_(value)
    resumed.prepare_to_load({k: (v.shape, v.dtype) for k, v in snapshot(engine).items()})
    resumed.load_state_dict({**snapshot(engine), **state})
    assert train(resumed, 1, ONE_RANK)[0].loss_scale == scale
    assert snapshot(resumed)["loss_scale/value"] == (scale if loaded == "fp16" else 0)
    if loaded == "fp16":
        assert snapshot(resumed)["loss_scale/clean_steps"] == clean_steps + 1


def test_scale_is_limited_by_the_rules_of_the_resumed_run() -> None:
    engine = make_engine(policy="fp16")
    resumed = make_engine(policy="fp16", loss_scale=LossScaleConfig(init=16, max_scale=64))
    resumed.load_state_dict(snapshot(engine))
    assert train(resumed, 1, ONE_RANK)[0].loss_scale == 64


# Host and device


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp16-autocast"])
def test_the_host_reads_nothing_in_a_fused_step(policy: str) -> None:
    engine = make_engine(
        policy=policy,
        max_norm=1.0,
        schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    )
    train(engine, 2, ONE_RANK)
    batches = microbatches(2, ONE_RANK[0])
    with HostReads() as reads:
        outcome = engine.step(batches)
    assert reads.found == []
    assert not outcome.numbers.skipped


class Unread(dict[str, Tensor]):
    """An outcome that stays on its device."""

    ranks_differ = False

    def __init__(self, values: dict[str, Tensor], *computed: Any) -> None:
        super().__init__(values)

    def read(self, name: str) -> float:
        return 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "fp32", "divergence": DivergenceConfig(on_spike="skip")},
        {"policy": "fp16"},
        {"policy": "bf16", "on_nonfinite": "drop_microbatch"},
    ],
)
def test_step_copies_nothing_to_another_device(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Tensors on the device "meta" have no values to read, and cannot be mixed with CPU tensors."""
    # Copies to the host: the outcome, and in the first two steps which parameters were used.
    monkeypatch.setattr("distmp.engine.step.StepOutcome", Unread)
    monkeypatch.setattr("distmp.distributed.world.DEVICE_TYPES", ("meta",))
    monkeypatch.setattr(nn.Parameter, "is_meta", False, raising=False)
    monkeypatch.setattr(
        "distmp.buckets.used_parameters.on_host", lambda values: [1] * values.numel()
    )
    # torch has neither autocast nor this kernel for the device "meta".
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kwargs: updated.append(kwargs))
    monkeypatch.setattr(optimizer_module, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    monkeypatch.setattr("distmp.distributed.world.usable_device", torch.device)
    updated: list[Any] = []
    engine = make_engine(
        device="meta",
        max_norm=1.0,
        nominal_weight=16.0,
        schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
        first_step_checks=False,
        **options,
    )
    for step in range(3):
        batches = [
            Batch(batch.inputs.to("meta"), batch.labels.to("meta"))
            for batch in microbatches(step, ONE_RANK[0])
        ]
        numbers: Any = engine.step(batches)
        tensors = [value for value in numbers.values() if isinstance(value, Tensor)]
        assert {value.device.type for value in tensors} == {"meta"}
    assert len(updated) == 3
    for given in updated:
        assert {given[name].device.type for name in ("lr", "grad_scale", "found_inf")} == {"meta"}


def test_host_device_synchronization_is_detected() -> None:
    engine = make_engine(optimizer=foreach_adamw)
    with HostReads() as reads:
        train(engine, 1, ONE_RANK)
    assert "aten._local_scalar_dense.default" in reads.found


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("optimizer", [fused_adamw, fused_sgd])
    def test_no_host_wait_from_the_third_step_on(
        self, optimizer: Callable[[Any], torch.optim.Optimizer], policy: str
    ) -> None:
        engine = make_engine(
            optimizer=optimizer,
            policy=policy,
            device="cuda",
            max_norm=1.0,
            schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
        )
        train(engine, 2, ONE_RANK)
        batches = [
            Batch(batch.inputs.cuda(), batch.labels.cuda(), batch.factor)
            for batch in microbatches(2, ONE_RANK[0])
        ]
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcomes = [engine.step(batches) for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [outcome.numbers.applied_total for outcome in outcomes] == [3, 4, 5]

    # Older releases of torch have no fused Adagrad for CUDA.
    @pytest.mark.parametrize("optimizer", [one for one in OPTIMIZERS if one is not fused_adagrad])
    def test_training_equals_that_on_the_cpu(
        self, optimizer: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        engine = make_engine(optimizer=optimizer, device="cuda", max_norm=1.3)
        numbers = train(engine, 20, ONE_RANK)
        expected, losses_and_norms = plain_training(
            20, ONE_RANK, PLAIN.get(optimizer, optimizer), 1.3
        )
        found = {name: weight.cpu() for name, weight in weights(engine).items()}
        assert error(found, expected) < 1e-4
        assert [step.loss for step in numbers] == pytest.approx(
            [mean for mean, _ in losses_and_norms], rel=1e-5
        )

    @pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-autocast"])
    def test_mixed_policies_learn(self, policy: str) -> None:
        engine = make_engine(policy=policy, device="cuda")
        labelled = samples(0, 16)
        numbers = [engine.step([labelled]).numbers for _ in range(40)]
        assert numbers[-1].loss < 0.5 * numbers[0].loss

    @pytest.mark.parametrize("optimizer", [fused_adamw, fused_sgd, sgd])
    def test_a_skipped_first_step_leaves_no_trace(
        self, optimizer: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        engine, reference = (
            make_engine(optimizer=optimizer, policy=SCALED, device="cuda") for _ in range(2)
        )
        assert engine.step(bad_batches(0)).numbers.skipped
        for one in (engine, reference):
            train(one, 3, ONE_RANK)
        assert_same_bits(trained(snapshot(engine)), trained(snapshot(reference)))


@pytest.mark.parametrize("optimizer", [fused_adamw, foreach_adamw, fused_sgd, sgd, adagrad])
def test_an_engine_goes_back_to_a_state_from_before_its_first_step(optimizer: Any) -> None:
    engine = make_engine(optimizer=optimizer)
    start = snapshot(engine)
    train(engine, 2, ONE_RANK)
    there = snapshot(engine)
    engine.load_state_dict(start)
    assert_same_bits(snapshot(engine), start)
    train(engine, 2, ONE_RANK)
    assert_same_bits(snapshot(engine), there)


def test_the_nominal_weight_is_part_of_the_state() -> None:
    def build() -> Engine:
        return make_engine(model=nn.Linear(2, 1), loss=sum_of_squares, optimizer=plain_sgd)

    first, resumed, other = build(), build(), build()
    first.step([torch.ones(4, 2)])
    resumed.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    for engine in (resumed, other):
        engine.step([torch.ones(64, 2)])
    assert (first.nominal_weight, resumed.nominal_weight, other.nominal_weight) == (4, 4, 64)


def test_the_memory_of_a_step_does_not_grow_with_its_microbatches() -> None:
    engine = make_engine(
        model=nn.Linear(64, 64),
        loss=lambda module, x: (F.mse_loss(module(x), x, reduction="sum"), len(x)),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3, fused=True),
        attribution=False,
    )
    microbatch = torch.ones(128, 64)
    peaks = {}
    for count in (2, 4, 64):  # one-time allocations happen in the first step
        with LiveStorages() as live:
            engine.step([microbatch] * count)
        peaks[count] = live.peak
    assert peaks[64] - peaks[4] < microbatch.nbytes


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("clip_grad_norm", "use max_norm"),
        ("precision", "use policy, such as 'bf16-autocast'"),
        ("gradient_accumulation_steps", r"engine\.step\(\[batch, batch\]\)"),
    ],
)
def test_argument_of_other_library_names_ours(name: str, advice: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}': .*{advice}"):
        make_engine(**{name: 1})


def test_an_unknown_argument_is_refused() -> None:
    message = (
        r"^Engine\(\) got an unexpected keyword argument 'max_grad_norm': did you mean 'max_norm'"
    )
    with pytest.raises(TypeError, match=message):
        make_engine(max_grad_norm=1.0)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "fp16,loss_scale=8"])
def test_hooks_change_gradients_of_the_mean(
    policy: str, fused: bool, max_norm: float | None
) -> None:
    torch.manual_seed(0)
    module, inputs = torch.nn.Linear(4, 2), torch.randn(6, 4)
    weight = module.weight.detach().double().requires_grad_()
    bias = module.bias.detach().double().requires_grad_()
    (inputs.double() @ weight.T + bias).square().sum().div(6).backward()
    assert weight.grad is not None
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_([weight, bias], max_norm)
    expected = weight - 0.1 * (weight.grad + 1.0)
    engine = Engine(
        module,
        lambda model, batch: (model(batch).square().sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1, fused=fused),
        policy=policy,
        max_norm=max_norm,
        device="cpu",
    )

    def add_one(*_: object) -> None:
        for gradient in engine.gradients().values():
            assert gradient is not None
            gradient += 1.0

    engine.optimizer.register_step_pre_hook(add_one)
    engine.step([inputs])
    found = engine.weights()["weight"].double()
    torch.testing.assert_close(
        found, expected.detach(), rtol=0, atol=1e-3 * ("fp16" in policy) + 1e-6
    )


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_run_no_hooks_and_no_step_of_the_user(fused: bool) -> None:
    ran: list[str] = []

    class Shrinking(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            ran.append("step")
            return super().step(closure)

    def run(name: str) -> Callable[..., None]:
        return lambda *_: ran.append(name)

    def replace_step(optimizer: torch.optim.Optimizer) -> None:
        step = optimizer.step
        optimizer.step = lambda *_: (ran.append("replaced"), step())  # type: ignore[method-assign,assignment]

    ways = (
        ("replaced", torch.optim.AdamW, replace_step),
        ("step", Shrinking, lambda _: None),
        ("pre", torch.optim.AdamW, lambda each: each.register_step_pre_hook(run("pre"))),
        ("post", torch.optim.AdamW, lambda each: each.register_step_post_hook(run("post"))),
        ("all", torch.optim.AdamW, lambda _: register_optimizer_step_pre_hook(run("all"))),
    )
    for name, kind, register in ways:
        engine = make_engine(optimizer=partial(kind, lr=1e-2, fused=fused))
        hook = register(engine.optimizer)
        engine.step(bad_batches(0))
        assert ran == []
        train(engine, 1, ONE_RANK)
        assert ran == [name]
        ran.clear()
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("fused", [False, True])
def test_step_of_the_user_reads_gradients_of_the_mean_after_clipping(fused: bool) -> None:
    norms: list[float] = []

    def read(optimizer: torch.optim.Optimizer) -> None:
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        norms.append(float(nn.utils.get_total_norm(gradients)))

    class Reading(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            read(self)
            return super().step(closure)

    engine = make_engine(optimizer=partial(Reading, lr=1e-2, fused=fused), max_norm=0.25)
    train(engine, 1, ONE_RANK)
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: read(optimizer))
    train(make_engine(optimizer=partial(adamw, fused=fused), max_norm=0.25), 1, ONE_RANK)
    hook.remove()
    assert norms == pytest.approx([0.25, 0.25], rel=1e-4)
