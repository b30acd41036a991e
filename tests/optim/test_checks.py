from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from distmp.config import load
from distmp.errors import ConfigError
from distmp.optim.factories import schedule_factory
from distmp.optim.learning_rates import LearningRates, build_schedule
from tests.optim.test_learning_rates import halving, make_optimizer
from tests.ranks import ranks
from tests.reference import make_engine, make_model

# Optimizers


def on_tensors(kind: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: kind([tensor for _, tensor in named], lr=0.1)


class SharpnessAware(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.LBFGS, "needs a closure"),
        (SharpnessAware, "needs a closure"),
        (torch.optim.SparseAdam, "sparse gradients only"),
    ],
)
def test_optimizer_that_cannot_step_is_refused_by_engine(kind: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_engine(optimizer=on_tensors(kind))
    assert (caught.value.setting, caught.value.value) == ("optimizer", kind.__name__)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, as many implementations do; some do not initialize the base class."""

    def __init__(self, named: Any, *, initialize: bool) -> None:
        self.inside = torch.optim.AdamW(named, lr=0.1)
        self.param_groups, self.state = self.inside.param_groups, self.inside.state
        if initialize:
            super().__init__(self.inside.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inside.step()


def test_optimizer_without_hooks_or_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'Lookahead': takes no hooks; call super"):
        make_engine(optimizer=lambda named: Lookahead(named, initialize=False))
    with pytest.raises(ConfigError, match="'Optimizer': has a parameter group without 'lr'"):
        make_engine(optimizer=lambda named: torch.optim.Optimizer(named, {}))


@ranks(2)
def test_wrapping_optimizer_is_refused_for_shards() -> None:
    optimizer = functools.partial(Lookahead, initialize=True)
    make_engine(strategy="ddp", optimizer=optimizer)
    with pytest.raises(ConfigError, match="Lookahead needs full parameters"):
        make_engine(strategy="ddp", shard_optimizer=True, optimizer=optimizer)


@pytest.mark.slow
@ranks(2)
def test_optimizer_with_hidden_state_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # torch warns about itself

    def build(named: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer([tensor for _, tensor in named], torch.optim.AdamW)

    with pytest.raises(ConfigError, match=r"'ZeroRedundancyOptimizer'.*shard_optimizer=True"):
        make_engine(optimizer=build)


@ranks(2)
def test_error_names_sharding_setting() -> None:
    with pytest.raises(ConfigError, match="Adafactor needs full parameters") as caught:
        make_engine(
            strategy="ddp", shard_optimizer=True, optimizer=on_tensors(torch.optim.Adafactor)
        )
    assert (caught.value.setting, caught.value.value) == ("shard_optimizer", True)


# Schedules


def one_cycle(optimizer: torch.optim.Optimizer, **options: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10, **options)


def chained(*builders: Any) -> Any:
    return lambda optimizer: lr_scheduler.ChainedScheduler(
        [build(optimizer) for build in builders], optimizer
    )


def in_turn(*builders: Any) -> Any:
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [build(optimizer) for build in builders],
        [3 * i + 3 for i in range(len(builders) - 1)],
    )


def rising(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)


def by_function(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))


ELSEWHERE = make_optimizer(1.0)


@pytest.mark.parametrize(
    ("schedule", "value", "message"),
    [
        (lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau", "follows a metric"),
        (one_cycle, "OneCycleLR", "build it with cycle_momentum=False"),
        (chained(rising, one_cycle), "OneCycleLR", "build it with cycle_momentum=False"),
        (lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0), "CyclicLR", "cycle_mom"),
        (lambda optimizer: halving(ELSEWHERE), "ExponentialLR", "is built on another optimizer"),
        (halving(ELSEWHERE), "ExponentialLR", "cannot be called with an optimizer"),
        (lambda: None, "<lambda>", "cannot be called with an optimizer"),
        (lr_scheduler.StepLR, "StepLR", "step_size"),
        (lambda optimizer: None, "NoneType", "is what the function returned"),
    ],
)
def test_unusable_schedule_is_named(schedule: Any, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_engine(schedule=schedule)
    assert (caught.value.setting, caught.value.value) == ("schedule", value)
    assert "schedule.options" not in str(caught.value)


@pytest.mark.parametrize(
    "schedule",
    [
        in_turn(rising, halving),
        in_turn(rising, by_function, halving),
        chained(rising, halving),
        in_turn(rising, lambda optimizer: one_cycle(optimizer, cycle_momentum=False)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*epoch parameter")
def test_composed_schedules_agree_with_torch(schedule: Any) -> None:
    optimizer, reference = make_optimizer(0.8, 0.1), make_optimizer(0.8, 0.1)
    rates = LearningRates(optimizer, schedule, torch.device("cpu"), on_device=False)
    torchs = schedule(reference)
    for applied in range(9):
        rates.set(torch.tensor(applied), applied)
        found, expected = (
            [group["lr"] for group in one.param_groups] for one in (optimizer, reference)
        )
        assert found == pytest.approx(expected, rel=1e-12)
        reference.step()
        torchs.step()


@pytest.mark.parametrize("rate", [-0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("on_device", [False, True])
def test_invalid_rate_of_schedule_is_refused_when_it_is_due(rate: float, on_device: bool) -> None:
    def build(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, lambda update: rate if update == 2 else 1.0)

    rates = LearningRates(make_optimizer(1.0), build, torch.device("cpu"), on_device=on_device)
    for applied in (0, 1):
        rates.set(torch.tensor(applied), applied)
    with pytest.raises(ConfigError, match=rf"'LambdaLR': gives .* rate {rate:g} for update 3; it"):
        rates.set(torch.tensor(2), 2)


def test_rounding_below_zero_at_the_end_of_a_schedule_is_taken() -> None:
    def build(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LinearLR(optimizer, 0.3, 0.0, 333)

    rates = LearningRates(make_optimizer(0.1), build, torch.device("cpu"), on_device=False)
    found = rates.set(torch.tensor(333), 333)
    assert -1e-12 < float(found) < 0


def test_any_object_with_step_is_a_schedule() -> None:
    class Own:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.group = optimizer.param_groups[0]

        def step(self) -> None:
            self.group["lr"] *= 0.5

    optimizer = make_optimizer(0.8)
    build_schedule(Own, optimizer).step()
    assert optimizer.param_groups[0]["lr"] == 0.4


def test_schedule_end_in_custom_training_loop_is_refused() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return one_cycle(optimizer, cycle_momentum=False)

    rates = LearningRates(make_optimizer(1.0), schedule, torch.device("cpu"), on_device=False)
    rates.set(torch.tensor(10), 10)
    with pytest.raises(
        ConfigError, match=r"^schedule = 'OneCycleLR': has no .* update 12 .*total_"
    ):
        rates.set(torch.tensor(11), 11)


def test_skipped_steps_do_not_end_schedule() -> None:
    """The host counts steps that the device has skipped."""

    def falling(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / 10)

    for schedule in (functools.partial(one_cycle, cycle_momentum=False), falling):
        rates = LearningRates(make_optimizer(1.0), schedule, torch.device("cpu"), on_device=True)
        plain = make_optimizer(1.0)
        expected = schedule(plain)
        for applied in range(10):
            found = rates.set(torch.tensor(applied), applied + 5)
            assert float(found) == pytest.approx(plain.param_groups[0]["lr"])
            plain.step()
            expected.step()
        with pytest.raises(ConfigError, match=r"^schedule = '.*' for update 12|update 12"):
            rates.set(torch.tensor(11), 16)


TORCH = "torch.optim.lr_scheduler"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            f"{TORCH}:OneCycleLR",
            "{max_lr: 0.1, total_steps: 800, cycle_momentum: false}",
            f"schedule.options.total_steps = 800: {TORCH}:OneCycleLR ends before the run, which "
            "has 1000 updates; set it to 1000",
        ),
        (f"{TORCH}:StepLR", "{}", f"schedule.options = {{}}: refused by {TORCH}:StepLR"),
        (
            "StepLR",
            "{}",
            "schedule.name = 'StepLR': choose one of constant, cosine, linear, wsd, or write an "
            "import path",
        ),
    ],
)
def test_unusable_schedule_configuration_names_setting(
    name: str, options: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--schedule.name", name, "--schedule.options", options])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_one_cycle_must_cover_the_run(warmup_steps: int) -> None:
    def attempt(total_steps: int) -> LearningRates:
        config = load(
            [
                *("--steps", "20", "--schedule.warmup-steps", str(warmup_steps)),
                *("--schedule.name", f"{TORCH}:OneCycleLR", "--schedule.options"),
                f"{{max_lr: 0.1, total_steps: {total_steps}, cycle_momentum: false}}",
            ]
        )
        return LearningRates(
            make_optimizer(0.5),
            schedule_factory(config.schedule, config.steps),
            torch.device("cpu"),
            on_device=False,
        )

    enough = 20 - warmup_steps - 1
    attempt(enough).set(torch.tensor(19), 19)
    with pytest.raises(ConfigError, match=r"schedule\.options\.total_steps"):
        attempt(enough - 1)


def test_all_other_torch_optimizers_are_accepted() -> None:
    kinds = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    taken = kinds - {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    assert torch.optim.Adafactor in taken
    for kind in taken:
        model = make_model()
        if kind.__name__ == "Muon":  # for matrices
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.dim() == 2)
        make_engine(model=model, optimizer=on_tensors(kind))
