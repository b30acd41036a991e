"""The engine finds why a step was skipped, on one and two real ranks; other steps cost nothing."""

from __future__ import annotations

import gc
import json
import math
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.buckets.parameters import WATCHED_STEPS
from distmp.diagnosis.attribution import OverflowReport
from distmp.engine.engine import Engine
from distmp.engine.setup import EngineSetup
from distmp.errors import TrainingError
from distmp.scaling.settings import LossScaleConfig
from tests.marks import nightly
from tests.ranks import in_turn, ranks, same_on_all_ranks
from tests.reference import (
    INPUTS,
    ONE_RANK,
    Batch,
    assert_same_bits,
    foreach_adamw,
    fused_adamw,
    loss,
    make_engine,
    make_model,
    microbatches,
    sgd,
    snapshot,
    train,
    trained,
)

TOO_HIGH = LossScaleConfig(init=2.0**24)
HIGH = LossScaleConfig(init=2.0**20)


class Root(nn.Module):
    """Has a finite value and a non-finite gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (0 * x).sqrt()


def clean(batch: Batch) -> Batch:
    return batch


def diverging(batch: Batch) -> Batch:
    """Make the loss infinite, by a factor that is not a tensor of the batch."""
    return batch._replace(factor=math.inf)


def beyond_fp16(batch: Batch) -> Batch:
    """Return inputs that are finite in float32 and infinite in float16."""
    return batch._replace(inputs=batch.inputs * 1e6)


def steep(batch: Batch) -> Batch:
    """Make the gradient of the loss too large for float16 at any scale."""
    return batch._replace(factor=1e8)


def made_non_finite(batch: Batch) -> Batch:
    inputs = batch.inputs.clone()
    inputs[0, :2] = math.nan
    return batch._replace(inputs=inputs)


def step_batches(
    engine: Engine, change: Callable[[Batch], Batch], rank: int | None = 0
) -> list[Batch]:
    """Return three microbatches; `change` is applied to the last two of `rank`."""
    batches = microbatches(0, ((4, 4, 4), (4, 4, 4)), engine.world.rank)
    if rank not in (None, engine.world.rank):
        return batches
    return [batches[0], *map(change, batches[1:])]


def explained(engine: Engine, batches: list[Batch]) -> OverflowReport:
    outcome = engine.step(batches)
    assert outcome.numbers.skipped
    report = engine.explain(outcome)
    assert report is not None
    assert report is engine.explain(outcome) is outcome.overflow_report
    json.dumps(report.to_record())
    return report


# Each cause, on one rank


@pytest.mark.parametrize("policy", ["fp16", "fp16-autocast"])
def test_scale_too_high(policy: str) -> None:
    engine = make_engine(policy=policy, loss_scale=TOO_HIGH)
    report = explained(engine, step_batches(engine, clean))
    assert (report.cause, report.microbatch, report.exact) == ("scale_too_high", 0, True)
    assert report.module == "head"
    first = report.parameters[0]
    assert (first.name, first.rank, first.microbatch) == ("head.weight", 0, 0)
    assert first.inf + first.nan > 0
    assert first.inf + first.nan <= make_model().head.weight.numel()
    # Backing off helps, at the latest when the gradients of the parameters fit.
    assert report.fitting_scale is not None
    numbers = engine.step(step_batches(engine, clean)).numbers
    while numbers.skipped:
        numbers = engine.step(step_batches(engine, clean)).numbers
    assert report.fitting_scale / 4 <= numbers.loss_scale <= report.fitting_scale


@pytest.mark.parametrize("policy", ["fp16", "fp16-autocast"])
@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_range_too_wide(policy: str, scale: float) -> None:
    engine = make_engine(policy=policy, loss_scale=LossScaleConfig(init=scale))
    report = explained(engine, step_batches(engine, steep))
    assert (report.cause, report.microbatch) == ("range_too_wide", 1)
    assert "use a bf16 policy" in report.advice


class TwoHeads(nn.Module):
    """A model with gradients of very different size."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(INPUTS, 1, bias=False)
        self.small = nn.Linear(INPUTS, 50, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return 2e4 * self.large(x).sum() + 1e-8 * self.small(x).sum()


def test_range_too_wide_because_most_gradients_would_be_zero() -> None:
    def total(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return model(batch.inputs), len(batch.labels)

    scale = LossScaleConfig(init=2.0**14)
    engine = make_engine(model=TwoHeads(), loss=total, policy="fp16", loss_scale=scale)
    report = explained(engine, [Batch(torch.ones(1, INPUTS), torch.zeros(1))])
    assert (report.cause, report.parameters_total) == ("range_too_wide", 1)
    assert report.lost_share is not None
    assert report.lost_share > 0.9
    assert "become zero" in report.diagnosis


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-autocast", "fp16", "fp16-autocast"])
def test_nonfinite_loss(policy: str) -> None:
    engine = make_engine(policy=policy)
    report = explained(engine, step_batches(engine, diverging))
    assert (report.cause, report.module, report.microbatch) == ("forward", None, 1)
    assert "loss function" in report.advice


@pytest.mark.parametrize("policy", ["fp16", "fp16-autocast"])
def test_activations_beyond_fp16(policy: str) -> None:
    engine = make_engine(policy=policy)
    report = explained(engine, step_batches(engine, beyond_fp16))
    assert (report.cause, report.module, report.microbatch) == ("forward", "first", 1)
    assert "use a bf16 policy" in report.advice


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_bad_input(policy: str) -> None:
    engine = make_engine(policy=policy)
    report = explained(engine, step_batches(engine, made_non_finite))
    assert (report.cause, report.microbatch) == ("bad_input", 1)
    assert "4 inf or NaN" in report.diagnosis


def test_mask_of_negative_infinities_is_not_reported_as_bad_input() -> None:
    def masked(model: nn.Module, batch: tuple[Batch, Tensor]) -> tuple[Tensor, float]:
        return loss(model, batch[0])

    engine = make_engine(loss=masked, policy="fp16", loss_scale=TOO_HIGH)
    outcome = engine.step(
        [(batch, torch.tensor([-math.inf])) for batch in microbatches(0, ((4,),))]
    )
    report = engine.explain(outcome)
    assert report is not None
    assert report.cause == "scale_too_high"


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_backward_that_divides_by_zero(policy: str) -> None:
    model = make_model()
    model.blocks[1] = nn.Sequential(nn.Linear(12, 12), Root())
    engine = make_engine(model=model, policy=policy)
    report = explained(engine, step_batches(engine, clean))
    assert (report.cause, report.microbatch) == ("backward", 0)
    # The gradient of the head comes before it and is finite.
    assert report.parameters[0].module == report.module == "blocks.1.0"


def test_bad_parameter_and_bad_weight() -> None:
    engine = make_engine()
    with torch.no_grad():
        engine.module.blocks[0].linear.bias[2] = math.nan
    report = explained(engine, step_batches(engine, clean))
    assert (report.cause, report.module) == ("bad_parameter", "blocks.0.linear")
    engine = make_engine(
        loss=lambda model, batch: (loss(model, batch)[0], math.nan), nominal_weight=1
    )
    assert explained(engine, step_batches(engine, clean)).cause == "bad_weight"


# On two ranks


class Case(NamedTuple):
    change: Callable[[Batch], Batch]
    rank: int | None  # the rank whose microbatches `change` is applied to; None: all
    cause: str
    ranks: tuple[int, ...]
    microbatch: int
    scale: float = 2.0**10


CASES = {
    16: [
        Case(clean, None, "scale_too_high", (0, 1), 0, scale=2.0**24),
        Case(lambda batch: batch._replace(factor=2.0**14), 1, "scale_too_high", (1,), 1),
        Case(steep, 0, "range_too_wide", (0,), 1),
        Case(steep, None, "range_too_wide", (0, 1), 1),
        Case(beyond_fp16, 1, "forward", (1,), 1),
        Case(diverging, None, "forward", (0, 1), 1),
        Case(made_non_finite, 1, "bad_input", (1,), 1),
    ],
    32: [
        Case(diverging, 1, "forward", (1,), 1),
        Case(made_non_finite, 0, "bad_input", (0,), 1),
        Case(made_non_finite, None, "bad_input", (0, 1), 1),
    ],
}


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        ("ddp", "fp16"),
        ("fsdp", "fp16"),
        ("fsdp", "fp16-autocast"),
        nightly("ddp", "bf16"),
        nightly("fsdp", "bf16"),
        nightly("fsdp", "fp32"),
    ],
)
@ranks(2)
def test_each_cause_on_two_ranks(strategy: str, policy: str) -> None:
    for case in CASES[16 if policy.startswith("fp16") else 32]:
        scale = LossScaleConfig(init=case.scale)
        engine = make_engine(policy=policy, strategy=strategy, loss_scale=scale)
        report = explained(engine, step_batches(engine, case.change, case.rank))
        assert (report.cause, report.ranks) == (case.cause, case.ranks)
        assert report.microbatch == case.microbatch
        assert {entry.rank for entry in report.parameters} == set(case.ranks)
        names = {name for name, _ in make_model().named_parameters()}
        # A non-finite loss makes every gradient non-finite; all of them are reported.
        lost = report.cause in ("forward", "bad_input")
        assert 0 < report.parameters_total <= len(names)
        assert report.parameters_total == len(names) or not lost
        assert {entry.name for entry in report.parameters} <= names
        numels = {name: value.numel() for name, value in make_model().named_parameters()}
        # Counted on the full gradient of each rank, also with sharded parameters.
        assert all(0 < e.inf + e.nan <= numels[e.name] for e in report.parameters)
        assert same_on_all_ranks(report)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(2)
def test_explain_does_not_change_training(strategy: str) -> None:
    class Noisy(nn.Module):
        """Draws random numbers and keeps running statistics."""

        def __init__(self) -> None:
            super().__init__()
            self.statistics = nn.BatchNorm1d(INPUTS, affine=False)
            self.dropout = nn.Dropout(0.5)
            self.classifier = make_model()

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.dropout(self.statistics(x)))

    states = []
    for asks in (True, False):
        torch.manual_seed(dist.get_rank())
        engine = make_engine(
            model=Noisy(), policy="fp16", strategy=strategy, loss_scale=HIGH, attribution=asks
        )
        reports = []
        for _ in range(8):
            outcome = engine.step(step_batches(engine, clean))
            reports.append(engine.explain(outcome))
        assert any(reports) == asks
        assert outcome.numbers.applied_total > 2
        states.append((snapshot(engine), torch.get_rng_state()))
    assert_same_bits(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_every_rank_raises_in_the_same_step_with_the_cause(strategy: str) -> None:
    rules = LossScaleConfig(init=8.0, min_scale=2.0, hysteresis=2)
    engine = make_engine(policy="fp16", strategy=strategy, loss_scale=rules)
    # 8, 8, 4, 2: the fourth overflow finds the scale at its minimum.
    for _ in range(3):
        engine.check(engine.step(step_batches(engine, steep, rank=1)))
    with pytest.raises(TrainingError) as caught:
        engine.check(engine.step(step_batches(engine, steep, rank=1)))
    message = str(caught.value)
    assert same_on_all_ranks(message)
    assert message.startswith("min_scale = 2: overflow at the lowest loss")
    assert "'head.weight'" in message
    assert "on rank 1 of 2 only" in message
    assert "use a bf16 policy" in message


# What does not recur, and 16-bit parameters

# Strategy and whether the optimizer is sharded.
LAYOUTS = [("ddp", False), ("ddp", True), ("fsdp", False)]


class Glitch(nn.Module):
    """Applies `change` to its input, in the forward pass with this number only."""

    def __init__(self, at: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.at, self.change, self.passes = at, change, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.change(x) if self.passes - 1 == self.at else x


class Steep(torch.autograd.Function):
    """The identity, with NaN as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


def glitching(change: Callable[[Tensor], Tensor], rank: int, **options: Any) -> Engine:
    """Return an engine whose model fails once, in the second microbatch of this rank."""
    model = nn.Sequential(make_model(), Glitch(1 if dist.get_rank() == rank else -1, change))
    return make_engine(model=model, first_step_checks=False, **options)


@ranks(2)
@in_turn(("strategy", "shards"), LAYOUTS)
@in_turn("policy", ["fp32", "bf16", "fp16"])
def test_loss_that_is_finite_in_replay_is_not_attributed_to_the_loss_function(
    strategy: str, shards: bool, policy: str
) -> None:
    options = {"policy": policy, "strategy": strategy, "shard_optimizer": shards}
    engine = glitching(lambda x: x * math.inf, rank=1, **options)
    report = explained(engine, step_batches(engine, clean))
    assert (report.cause, report.ranks, report.microbatch) == ("not_repeated", (1,), 1)
    assert report.diagnosis.startswith("an overflow that did not recur when the step was repeated")
    assert re.search(
        r"the loss was (inf|nan), and \d.* in the repetition on rank 1 of 2 only, microbatch 1",
        report.diagnosis,
    )
    assert "loss function" not in str(report)
    for suspect in ("changed in place", "non-deterministic", "memory or hardware"):
        assert suspect in report.advice
    assert ("FP32 master weights" in report.advice) == (policy != "fp32")
    assert not engine.step(step_batches(engine, clean)).numbers.skipped


@ranks(2)
@in_turn(("strategy", "shards"), LAYOUTS)
def test_gradients_that_are_finite_in_replay(strategy: str, shards: bool) -> None:
    options = {"policy": "bf16", "strategy": strategy, "shard_optimizer": shards}
    engine = glitching(Steep.apply, rank=0, **options)
    report = explained(engine, step_batches(engine, clean))
    assert (report.cause, report.parameters) == ("not_repeated", ())
    assert "did not recur" in report.diagnosis
    assert "non-deterministic" in report.advice


def test_a_batch_that_is_overwritten_after_the_step() -> None:
    engine = make_engine()
    batches = step_batches(engine, made_non_finite)
    outcome = engine.step(batches)
    for batch in batches:
        batch.inputs.zero_()
    report = engine.explain(outcome)
    assert report is not None
    assert report.cause == "not_repeated"
    assert "changed in place" in report.advice


@ranks(2)
@in_turn("shards", [False, True])
@in_turn("policy", ["bf16", "fp16"])
def test_a_nan_written_into_a_16_bit_parameter(policy: str, shards: bool) -> None:
    engine = make_engine(policy=policy, strategy="ddp", shard_optimizer=shards)
    for _ in range(WATCHED_STEPS):  # in which such a write is an error
        engine.step(step_batches(engine, clean))
    weight = engine.module.head.weight
    expected = weight.clone()
    if engine.world.rank == 1:
        # Like a memory fault: torch does not see the write, so the engine cannot refuse it.
        weight.data[0, 0] = math.nan
    report = explained(engine, step_batches(engine, clean))
    # The step has restored it from its FP32 master weight.
    assert torch.equal(weight, expected)
    assert (report.cause, report.ranks, report.microbatch) == ("not_repeated", (1,), 0)
    assert "copied from FP32 master weights after every step" in report.advice
    numbers = engine.step(step_batches(engine, clean)).numbers
    assert (numbers.skipped, numbers.applied_total) == (False, WATCHED_STEPS + 1)


class Overwriting(nn.Module):
    """Writes NaN into one of its parameters in every forward, on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.classifier = make_model()
        self.rank = rank
        self.classifier.head.register_forward_pre_hook(self.spoil)

    @torch.no_grad()
    def spoil(self, head: nn.Module, args: Any) -> None:
        if dist.get_rank() == self.rank:
            head.weight.data[0, 0] = math.nan  # torch does not count writes to `data`

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)


@ranks(2)
@in_turn(("strategy", "shards"), LAYOUTS)
@in_turn("policy", ["bf16", "fp16"])
def test_a_16_bit_parameter_that_is_overwritten_again_and_again(
    strategy: str, shards: bool, policy: str
) -> None:
    model = Overwriting(rank=1)
    engine = make_engine(
        model=model,
        policy=policy,
        strategy=strategy,
        shard_optimizer=shards,
        first_step_checks=False,  # they would refuse it
    )
    report = explained(engine, step_batches(engine, clean)[:1])
    assert (report.cause, report.ranks) == ("bad_parameter", (1,))
    assert report.module == "classifier.head"
    assert report.diagnosis == (
        "the FP32 master weight of 'classifier.head.weight' is finite, but the parameter holds inf "
        "or NaN on rank 1 of 2 only"
    )
    assert "copied from its FP32 master weight after every step" in report.advice


@ranks(2)
@in_turn(("strategy", "shards"), LAYOUTS)
def test_a_master_weight_beyond_the_range_of_float16(strategy: str, shards: bool) -> None:
    model = make_model()
    with torch.no_grad():
        model.blocks[0].linear.weight[0, 0] = 1e6
    engine = make_engine(model=model, policy="fp16", strategy=strategy, shard_optimizer=shards)
    report = explained(engine, step_batches(engine, clean))
    assert (report.cause, report.module) == ("bad_parameter", "blocks.0.linear")
    assert "FP32 master weight is beyond the range of float16" in report.diagnosis
    assert "use a bf16 policy" in report.advice


@ranks(2)
@in_turn(("strategy", "shards"), LAYOUTS)
@in_turn("policy", ["fp32", "bf16"])
def test_an_fp32_weight_that_is_not_finite_is_named_where_it_lies(
    strategy: str, shards: bool, policy: str
) -> None:
    engine = make_engine(policy=policy, strategy=strategy, shard_optimizer=shards)
    engine.step(step_batches(engine, clean))  # ranks compare their weights in the first step
    parts = {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in engine._setup.strategy.optimizer_parameters()
    }
    name = [name for name, part in parts.items() if part.numel()][-1]
    if engine.world.rank == 1:
        with torch.no_grad():
            parts[name].data.view(-1)[-1] = math.nan
    engine._setup.strategy.publish_weights()
    report = explained(engine, step_batches(engine, clean))
    assert (report.cause, report.ranks) == ("bad_parameter", (1,))
    assert "itself holds inf or NaN on rank 1 of 2 only" in report.diagnosis
    if engine.world.rank == 1:
        assert repr(name) in report.diagnosis
    assert "earlier checkpoint" in report.advice


# Giving up


@pytest.mark.parametrize("attribution", [True, False])
def test_a_static_scale_gives_up_after_too_many_skips(attribution: bool) -> None:
    engine = make_engine(
        policy="fp16",
        loss_scale=LossScaleConfig(init=2.0**24, dynamic=False),
        max_consecutive_skips=3,
        attribution=attribution,
    )
    for _ in range(2):
        engine.check(engine.step(step_batches(engine, clean)))
    outcome = engine.step(step_batches(engine, clean))
    assert not outcome.numbers.scale_exhausted
    with pytest.raises(TrainingError) as caught:
        engine.check(outcome)
    message = str(caught.value)
    assert message.startswith("max_consecutive_skips = 3: that many steps in a row")
    assert ("lower the loss scale (init)" in message) == attribution
    assert ("'head.weight'" in message) == attribution


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_without_a_loss_scale_only_the_number_of_skips_counts(policy: str) -> None:
    engine = make_engine(policy=policy, max_consecutive_skips=2)
    outcome = engine.step(step_batches(engine, diverging))
    engine.check(outcome)
    assert not outcome.numbers.scale_exhausted
    engine.check(engine.step(step_batches(engine, clean)))
    engine.check(engine.step(step_batches(engine, diverging)))
    with pytest.raises(TrainingError, match="the loss itself is not finite"):
        engine.check(engine.step(step_batches(engine, diverging)))


# When `explain` is called, and steps that it does not explain


def test_explain_one_step_later_after_an_update() -> None:
    engine = make_engine(policy="fp16")
    skipped = engine.step(step_batches(engine, beyond_fp16))
    assert not engine.step(step_batches(engine, clean)).numbers.skipped
    before = trained(snapshot(engine))
    report = engine.explain(skipped)
    assert report is not None
    assert (report.cause, report.module, report.exact) == ("forward", "first", False)
    assert_same_bits(trained(snapshot(engine)), before)


class Unlucky(nn.Module):
    """Overflows at random."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = make_model()
        self.luck = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x) / self.luck(torch.ones(1))


def test_replay_draws_the_random_numbers_of_the_step() -> None:
    engine = make_engine(model=Unlucky())
    torch.manual_seed(0)
    first = []
    for _ in range(12):
        outcome = engine.step(step_batches(engine, clean))
        torch.rand(1)
        before = torch.get_rng_state()
        report = engine.explain(outcome)
        assert torch.equal(torch.get_rng_state(), before)
        if report is not None:
            assert (report.cause, report.module) == ("forward", "")
            first.append(report.microbatch)
    assert len(set(first)) > 1


def test_explain_one_step_later_after_a_skip_is_exact() -> None:
    engine = make_engine(policy="fp16")
    first = engine.step(step_batches(engine, beyond_fp16))
    engine.step(step_batches(engine, diverging))
    report = engine.explain(first)
    assert report is not None
    assert (report.module, report.exact) == ("first", True)


def test_steps_without_an_explanation() -> None:
    engine = make_engine()
    applied = engine.step(step_batches(engine, clean))
    old = engine.step(step_batches(engine, diverging))
    empty = engine.step(microbatches(0, ((0,),)))
    engine.step(step_batches(engine, clean))
    assert [engine.explain(outcome) for outcome in (applied, old, empty)] == [None] * 3
    assert old.numbers.overflow
    assert empty.numbers.skipped
    off = make_engine(attribution=False)
    assert off.explain(off.step(step_batches(off, diverging))) is None


# The cost of a clean step


class Operations(TorchDispatchMode):
    """Records every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# Not numpy: it reads memory of the CPU only, and raises for that of a device.
READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")
COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send"))
    and callable(getattr(dist, name))
]


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, names: Any) -> list[str]:
    """Record every call of these functions from now on."""
    called: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    return called


def steady_step(attribution: bool, optimizer: Any, policy: str) -> tuple[Engine, list[str]]:
    engine = make_engine(policy=policy, optimizer=optimizer, attribution=attribution, max_norm=1.0)
    train(engine, 3, ONE_RANK)
    batches = microbatches(3, ONE_RANK[3])
    with Operations() as operations:
        engine.step(batches)
    return engine, operations.names


@pytest.mark.parametrize("optimizer", [fused_adamw, foreach_adamw])
@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_clean_step_takes_the_same_operations_with_and_without_attribution(
    optimizer: Any, policy: str
) -> None:
    # A step also covers the buffers of other engines, so only one exists at a time.
    with_it = steady_step(True, optimizer, policy)[1]
    without = steady_step(False, optimizer, policy)[1]
    assert with_it == without


# Adam's other kernels read their own step counts on the host; SGD reads nothing.
@ranks(2)
@in_turn("optimizer", [fused_adamw, sgd])
@in_turn("strategy", ["ddp", "fsdp"])
def test_one_small_collective_and_at_most_one_read_in_a_clean_step(
    strategy: str, optimizer: Any
) -> None:
    engine = make_engine(policy="fp16", strategy=strategy, optimizer=optimizer, max_norm=1.0)
    batches = step_batches(engine, clean)
    for _ in range(3):
        assert not engine.step(batches).numbers.skipped
    with pytest.MonkeyPatch.context() as monkeypatch:
        # As on a device, where the outcome of the previous step is checked.
        monkeypatch.setattr(EngineSetup, "host_waits", False)
        reads = count_calls(monkeypatch, torch.Tensor, READS)
        collectives = count_calls(monkeypatch, dist, COLLECTIVES)
        with Operations() as operations:
            engine.step(batches)
    # With ddp there is one bucket; FSDP uses other collectives than all-reduce.
    assert collectives.count("all_reduce") == (2 if strategy == "ddp" else 1)
    assert not [name for name in collectives if "object" in name or "broadcast" in name]
    # With ddp, comparisons of 16-bit copies with the weights, before forward, after backward and
    # after the update, whose results were copied to the host in a step before.
    of_copies = ["tolist"] * 3 if strategy == "ddp" else []
    own = [] if optimizer is fused_adamw else ["item"]
    assert reads == [*of_copies[:2], *own, *of_copies[2:]]
    assert operations.names.count("aten._local_scalar_dense.default") == len(own)


@ranks(2)
def test_explaining_takes_one_collective_and_only_after_an_overflow() -> None:
    engine = make_engine(policy="fp16", strategy="ddp")
    good = engine.step(step_batches(engine, clean))
    bad = engine.step(step_batches(engine, steep, rank=1))
    assert bad.numbers.overflow
    with pytest.MonkeyPatch.context() as monkeypatch:
        collectives = count_calls(monkeypatch, dist, COLLECTIVES)
        assert engine.explain(good) is None
        assert collectives == []
        assert engine.explain(bad) is not None
        assert collectives == ["all_gather_object"]


@pytest.mark.nightly
def test_microbatches_are_kept_for_two_steps_and_not_without_attribution() -> None:
    for attribution in (True, False):
        engine = make_engine(attribution=attribution)
        batches = step_batches(engine, clean)
        kept = weakref.ref(batches[0].inputs)
        outcome = engine.step(batches)
        del batches
        alive = []
        for step in range(3):
            gc.collect()
            alive.append(kept() is not None)
            train(engine, 1, ONE_RANK, first=step)
        assert alive == ([True, True, False] if attribution else [False] * 3)
        assert not outcome.numbers.skipped


@pytest.mark.gpu
@pytest.mark.parametrize("change", [beyond_fp16, diverging, made_non_finite, steep])
def test_on_cuda_a_step_is_explained_when_the_next_one_has_been_started(
    change: Callable[[Batch], Batch],
) -> None:
    causes = []
    for device in ("cpu", "cuda"):
        engine = make_engine(policy="fp16", device=device)
        assert engine.host_waits == (device == "cpu")
        skipped = engine.step(step_batches(engine, change))
        engine.step(step_batches(engine, clean))
        before, generator = trained(snapshot(engine)), torch.cuda.get_rng_state()
        report = engine.explain(skipped)
        assert report is not None
        assert_same_bits(trained(snapshot(engine)), before)
        assert torch.equal(torch.cuda.get_rng_state(), generator)
        causes.append((report.cause, report.module, report.microbatch, report.exact))
    assert causes[0] == causes[1]
