from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from distmp.errors import ConfigError
from distmp.optim import AdamW
from distmp.optim.factories import (
    NamedParameters,
    optimizer_factory,
    schedule_factory,
    weight_decay_groups,
)
from distmp.optim.learning_rates import LearningRates
from distmp.optim.settings import OptimizerConfig, ScheduleConfig

STEPS = 30


def named_parameters() -> NamedParameters:
    return list(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)).named_parameters())


# Optimizers


@pytest.mark.parametrize(
    ("name", "kind", "fused"),
    [
        ("adamw", torch.optim.AdamW, True),
        ("adam", torch.optim.Adam, True),
        ("sgd", torch.optim.SGD, True),
        ("adagrad", torch.optim.Adagrad, False),
    ],
)
def test_every_named_optimizer_is_built(name: str, kind: type, fused: bool) -> None:
    optimizer = optimizer_factory(OptimizerConfig(name, lr=0.2))(named_parameters())
    assert type(optimizer) is kind
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2]
    assert [group["fused"] for group in optimizer.param_groups] == [fused] * 2


def test_matrices_decay_and_vectors_do_not() -> None:
    optimizer = optimizer_factory(OptimizerConfig(weight_decay=0.3))(named_parameters())
    found = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert found == {"0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4)])
def test_groups_without_parameters_are_omitted(shape: tuple[int, ...]) -> None:
    (group,) = weight_decay_groups([("p", torch.zeros(shape))], 0.3)
    assert group["weight_decay"] == (0.3 if len(shape) >= 2 else 0.0)


def test_options_are_passed_to_optimizer() -> None:
    config = OptimizerConfig("sgd", options={"momentum": 0.7, "nesterov": True})
    (group, _) = optimizer_factory(config)(named_parameters()).param_groups
    assert (group["momentum"], group["nesterov"]) == (0.7, True)


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_fused_default_can_be_overridden(options: dict[str, Any]) -> None:
    optimizer = optimizer_factory(OptimizerConfig("adamw", options=options))(named_parameters())
    assert not any(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "adamv"}, r"optim\.name = 'adamv': did you mean 'adam"),
        ({"name": "quux"}, r"choose one of adagrad, adam, adamw, muon, sgd"),
        ({"options": {"betaz": 1}}, r"optim\.options\.betaz = 1: did you mean 'betas'\?"),
        ({"options": {"betas": 1}}, r"optim\.options\.betas = 1: write 2 numbers, as in \[0\.9"),
        ({"options": {"betas": [0.9]}}, r"optim\.options\.betas = \[0\.9\]: write 2 numbers"),
        ({"options": {"betas": [0.9, 0.95, 0.99]}}, r"0\.99\]: write 2 numbers"),
        ({"options": {"betas": [0.9, math.nan]}}, r"betas = \[0\.9, nan\]: use finite numbers"),
        ({"options": {"eps": math.inf}}, r"options\.eps = inf: use finite numbers"),
        ({"options": {"amsgrad": "no"}}, r"amsgrad = 'no': must be true or false, not text"),
        ({"options": {"fused": "off"}}, r"fused = 'off': must be true or false, not text"),
        ({"name": "sgd", "options": {"nesterov": 1}}, r"nesterov = 1: must be true or false"),
        ({"options": {"lr": 1.0}}, r"optim\.options\.lr = 1\.0: set optim\.lr instead"),
        ({"options": {"weight_decay": 1}}, r"options\.weight_decay = 1: set optim\.weight_decay"),
        ({"name": "sgd", "options": {"betas": 1}}, r"optim\.options\.betas = 1"),
        ({"name": "math:pi"}, r"optim\.name = 'math:pi': is a float; name a function or a class"),
        ({"name": "math:tau2"}, r"module 'math' has no 'tau2'"),
        ({"lr": -1.0}, r"optim\.lr = -1\.0"),
        ({"lr": math.nan}, r"optim\.lr = nan"),
        ({"weight_decay": -0.1}, r"optim\.weight_decay = -0\.1"),
        ({"weight_decay": math.inf}, r"optim\.weight_decay = inf"),
        ({"max_norm": 0.0}, r"optim\.max_norm = 0\.0: .* null for no clipping"),
        ({"max_norm": math.nan}, r"optim\.max_norm = nan"),
    ],
)
def test_invalid_optimizer_settings_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer_factory(OptimizerConfig(**config))


@pytest.mark.parametrize(
    "options", [{"betas": (2.0, 0.9)}, {"eps": -1.0}, {"fused": True, "foreach": True}]
)
def test_options_refused_by_optimizer_are_named(options: dict[str, Any]) -> None:
    create = optimizer_factory(OptimizerConfig("adamw", options=options))
    with pytest.raises(ConfigError, match=r"^optim\.options = .*refused by adamw: "):
        create(named_parameters())


def test_stochastic_rounding_selects_optimizer() -> None:
    config = OptimizerConfig(lr=0.2, options={"betas": (0.8, 0.9)})
    optimizer = optimizer_factory(config, stochastic_rounding=True)(named_parameters())
    assert type(optimizer) is AdamW
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.stochastic_rounding


def test_optimizer_is_built_from_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, strength: float) -> None:
            super().__init__(params, lr=lr)
            self.strength = strength

    module = ModuleType("own_optimizers")
    module.Own = Own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_optimizers", module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = OptimizerConfig("own_optimizers:Own", lr=0.3, options={"strength": 2.0})
    optimizer = optimizer_factory(config)(named_parameters())
    assert isinstance(optimizer, Own)
    assert optimizer.strength == 2.0
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    with pytest.raises(ConfigError, match="did you mean 'strength'"):
        optimizer_factory(OptimizerConfig("own_optimizers:Own", options={"strenght": 1}))


# Schedules


def rates_of(
    config: ScheduleConfig, steps: int = STEPS, peak: float = 0.5, taken: int | None = None
) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    rates = LearningRates(
        optimizer, schedule_factory(config, steps), torch.device("cpu"), on_device=False
    )
    found = []
    for applied in range(taken or steps):
        rates.set(torch.tensor(applied), applied)
        found.append(optimizer.param_groups[0]["lr"])
    return found


TORCH_SCHEDULES: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.3, "total_iters": 4},
    "CosineAnnealingLR": {"T_max": 20, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 4, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 5, "cycle_momentum": False},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {"start_factor": 0.2, "total_iters": 7},
    "MultiStepLR": {"milestones": [3, 9], "gamma": 0.5},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": STEPS, "cycle_momentum": False},
    "PolynomialLR": {"total_iters": 20, "power": 2.0},
    "StepLR": {"step_size": 4},
}


@pytest.mark.parametrize("warmup_steps", [0, 1, 6])
@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_torch_schedule_agrees_with_torch(name: str, warmup_steps: int) -> None:
    options = TORCH_SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = getattr(lr_scheduler, name)(optimizer, **options)
    expected = [0.5 * (step + 1) / (warmup_steps + 1) for step in range(warmup_steps)]
    while len(expected) < STEPS:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    if name == "OneCycleLR":  # it starts at its own rate, which the warm-up leads to
        start = expected[warmup_steps]
        expected[:warmup_steps] = [start / 0.5 * rate for rate in expected[:warmup_steps]]
    path = f"torch.optim.lr_scheduler:{name}"
    config = ScheduleConfig(path, warmup_steps=warmup_steps, options=options)
    assert rates_of(config) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("warmup_steps", [0, 1, 6])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_schedule_shapes_agree_with_formulas(name: str, final: float, warmup_steps: int) -> None:
    peak, length = 0.5, STEPS - warmup_steps

    def shape(update: int) -> float:
        done = update / length
        if name == "cosine":
            return peak * (final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)
        if name == "wsd":
            # The last four updates are strictly between the peak and `final`.
            late = update - (length - 5)
            return peak if late <= 0 else peak * (1 + (final - 1) * late / 5)
        return peak * (1 + (final - 1) * done) if name == "linear" else peak

    expected = [peak * (step + 1) / (warmup_steps + 1) for step in range(warmup_steps)]
    expected += [shape(update) for update in range(length)]
    decay = 4 if name == "wsd" else None
    final = 0.1 if name == "constant" else final
    config = ScheduleConfig(name, warmup_steps=warmup_steps, final=final, decay_steps=decay)
    assert rates_of(config) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(("steps", "warmup_steps"), [(19, 0), (20, 1), (1000, 50)])
def test_warmup_accepts_percentage(name: str, steps: int, warmup_steps: int) -> None:
    explicit = ScheduleConfig(name, warmup_steps)
    assert rates_of(ScheduleConfig(name, None), steps) == rates_of(explicit, steps)


def test_torch_scheduler_has_no_default_warmup() -> None:
    name = "torch.optim.lr_scheduler:ExponentialLR"
    config = ScheduleConfig(name, None, options={"gamma": 0.9})
    assert rates_of(config, 100) == pytest.approx([0.5 * 0.9**step for step in range(100)])


@pytest.mark.parametrize(
    ("decay_steps", "steps", "warmup_steps", "lowered"),
    [
        (4, 20, 0, [0.4, 0.3, 0.2, 0.1]),
        (1, 20, 3, [0.25]),
        (0, 20, 0, []),
        (None, 40, 0, [0.4, 0.3, 0.2, 0.1]),  # a tenth
        (None, 11, 2, [0.25]),  # at least one
        (9, 11, 2, [0.05 * left for left in range(9, 0, -1)]),
    ],
)
def test_wsd_lowers_the_rate_in_decay_steps_updates(
    decay_steps: int | None, steps: int, warmup_steps: int, lowered: list[float]
) -> None:
    config = ScheduleConfig("wsd", warmup_steps, final=0.0, decay_steps=decay_steps)
    stable = [0.5] * (steps - warmup_steps - len(lowered))
    assert rates_of(config, steps)[warmup_steps:] == pytest.approx(stable + lowered)
    if decay_steps == 0:  # also in a loop that goes on
        assert set(rates_of(config, steps, taken=steps + 2)) == {0.5}


def test_schedules_keep_ratio_of_group_rates() -> None:
    optimizer = torch.optim.SGD(
        [{"params": [torch.zeros(1)], "lr": rate} for rate in (0.5, 0.05)], lr=1.0
    )
    for name in ("constant", "linear", "cosine", "wsd"):
        config = ScheduleConfig(name, warmup_steps=3)
        rates = LearningRates(
            optimizer, schedule_factory(config, STEPS), torch.device("cpu"), on_device=False
        )
        for applied in (0, 5, 20):
            rates.set(torch.tensor(applied), applied)
            first, second = (group["lr"] for group in optimizer.param_groups)
            assert first == pytest.approx(10 * second)
        rates.set(torch.tensor(3), 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "cosinus"}, r"schedule\.name = 'cosinus': did you mean 'cosine'\?"),
        ({"name": "StepLR"}, r"schedule\.name = 'StepLR': .*import path"),
        ({"name": "cosine", "options": {"a": 1}}, r"schedule\.options = .*'cosine' takes none"),
        ({"name": "linear", "decay_steps": 3}, r"schedule\.decay_steps = 3: linear does not use"),
        ({"name": "constant", "final": 0.0}, r"schedule\.final = 0\.0: constant does not use it"),
        ({"name": "m:f", "final": 0.0}, r"schedule\.final = 0\.0: m:f does not use it"),
        ({"name": "cosinus", "final": 0.0}, r"did you mean 'cosine'\?"),
        ({"name": "wsd", "decay_steps": -3}, r"schedule\.decay_steps = -3"),
        ({"name": "wsd", "decay_steps": 10**6}, "is more than the run has"),
        ({"warmup_steps": -1}, r"schedule\.warmup_steps = -1"),
        ({"final": 1.5}, r"schedule\.final = 1\.5"),
        ({"final": math.nan}, r"schedule\.final = nan"),
    ],
)
def test_invalid_schedule_settings_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_factory(ScheduleConfig(**config), STEPS)


@pytest.mark.parametrize("warmup_steps", [0, 3])
@pytest.mark.parametrize(
    ("name", "options"), [("StepLR", {}), ("StepLR", {"size": 3}), ("ConstantLR", {"factor": 7.0})]
)
def test_options_refused_by_torch_scheduler_are_named(
    name: str, options: dict[str, Any], warmup_steps: int
) -> None:
    path = f"torch.optim.lr_scheduler:{name}"
    create = schedule_factory(ScheduleConfig(path, warmup_steps, options=options), STEPS)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    with pytest.raises(ConfigError, match=rf"^schedule\.options = .*refused by {path}: "):
        create(optimizer)


def test_scheduler_that_continues_without_initial_rates_is_refused() -> None:
    options = {"step_size": 2, "last_epoch": 5}
    config = ScheduleConfig("torch.optim.lr_scheduler:StepLR", 0, options=options)
    with pytest.raises(ConfigError, match=r"^schedule\.options = .*initial_lr"):
        schedule_factory(config, STEPS)(torch.optim.SGD([torch.zeros(1)], lr=0.5))
