from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmp.errors import ConfigError
from distmp.scaling.loss_scale import LossScale
from distmp.scaling.settings import LossScaleConfig, unused_rules

CPU = torch.device("cpu")
CLEAN, OVERFLOW, EMPTY, BOTH = "clean", "overflow", "empty", "both"

KINDS = {
    CLEAN: (False, False),
    OVERFLOW: (True, False),
    EMPTY: (False, True),
    # An empty step with a non-finite gradient.
    BOTH: (True, True),
}


def follow(scale: LossScale, kinds: list[str]) -> list[float]:
    """Return the scale after each step."""
    values = []
    for kind in kinds:
        overflow, empty = (torch.tensor(flag) for flag in KINDS[kind])
        scale.update(overflow, empty)
        values.append(scale.value.item())
    return values


class Model:
    """The rules in plain Python."""

    def __init__(self, rules: LossScaleConfig) -> None:
        self.rules = rules
        self.value = rules.init
        self.clean = 0
        self.overflows = 0

    def step(self, kind: str) -> bool:
        rules = self.rules
        if kind in (EMPTY, BOTH) or not rules.dynamic:
            return False
        if kind == CLEAN:
            self.overflows = 0
            self.clean += 1
            if self.clean == rules.growth_interval:
                self.clean = 0
                self.value = min(self.value * rules.growth_factor, rules.max_scale)
            return False
        self.clean = 0
        self.overflows += 1
        if self.overflows < rules.hysteresis:
            return False
        exhausted = self.value == rules.min_scale
        self.value = max(self.value * rules.backoff_factor, rules.min_scale)
        return exhausted


powers = st.integers(-20, 20).map(lambda exponent: 2.0**exponent)


@st.composite
def rules(draw: st.DrawFn) -> LossScaleConfig:
    low, init, high = sorted(draw(st.tuples(powers, powers, powers)))
    return LossScaleConfig(
        dynamic=draw(st.booleans()),
        init=init,
        min_scale=low,
        max_scale=high,
        growth_factor=draw(st.sampled_from([2.0, 4.0, 2.0**30])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 2.0**-30])),
        growth_interval=draw(st.integers(1, 4)),
        hysteresis=draw(st.integers(1, 3)),
    )


@given(rules(), st.lists(st.sampled_from(list(KINDS)), max_size=40), st.integers(0, 40))
def test_scale_follows_the_rules(config: LossScaleConfig, kinds: list[str], saved_at: int) -> None:
    model, scale = Model(config), LossScale(config, CPU)
    for index, kind in enumerate(kinds):
        if index == saved_at:
            state = scale.state_dict()
            scale = LossScale(config, CPU)
            scale.load_state_dict(state)
        exhausted = scale.update(*(torch.tensor(flag) for flag in KINDS[kind]))
        assert exhausted.item() == model.step(kind)
        assert scale.value.item() == model.value
        assert (scale.value.dtype, scale.value.dim()) == (torch.float32, 0)


def test_the_first_overflow_backs_off_by_default() -> None:
    scale = LossScale(LossScaleConfig(init=16, growth_interval=3), CPU)
    kinds = [CLEAN, OVERFLOW, CLEAN, CLEAN, CLEAN, EMPTY, OVERFLOW, OVERFLOW]
    assert follow(scale, kinds) == [16, 8, 8, 8, 16, 16, 8, 4]


def test_hysteresis_tolerates_isolated_overflows() -> None:
    scale = LossScale(LossScaleConfig(init=16, hysteresis=2), CPU)
    kinds = [OVERFLOW, CLEAN, OVERFLOW, EMPTY, OVERFLOW, OVERFLOW, CLEAN, OVERFLOW, OVERFLOW]
    assert follow(scale, kinds) == [16, 16, 16, 16, 8, 4, 4, 4, 2]


def test_an_overflow_that_is_tolerated_starts_the_growth_interval_anew() -> None:
    scale = LossScale(LossScaleConfig(init=16, hysteresis=2, growth_interval=2), CPU)
    assert follow(scale, [CLEAN, OVERFLOW, CLEAN, CLEAN]) == [16, 16, 16, 32]


def test_static_scale_never_changes() -> None:
    config = LossScaleConfig(dynamic=False, init=0.25, growth_interval=1)
    scale = LossScale(config, CPU)
    assert follow(scale, [OVERFLOW] * 3 + [CLEAN] * 3) == [0.25] * 6
    assert not scale.update(torch.tensor(True), torch.tensor(False))
    assert scale.floor is None


def test_without_rules_the_scale_is_one() -> None:
    scale = LossScale(None, CPU)
    assert follow(scale, [OVERFLOW, CLEAN]) == [1, 1]
    assert scale.floor is None


def test_the_scale_is_exhausted_only_when_a_backoff_is_due_at_the_minimum() -> None:
    scale = LossScale(LossScaleConfig(init=4, min_scale=2, hysteresis=2), CPU)
    exhausted = [
        scale.update(*(torch.tensor(flag) for flag in KINDS[kind])).item()
        for kind in (OVERFLOW, OVERFLOW, EMPTY, OVERFLOW, CLEAN, OVERFLOW, OVERFLOW)
    ]
    # The second overflow lowers it from 4 to 2, its minimum; it stays there.
    assert exhausted == [False, False, False, True, False, False, True]


@pytest.mark.parametrize("limit", [2.0**-126, 2.0**126])
def test_the_scale_is_always_a_normal_number(limit: float) -> None:
    config = LossScaleConfig(
        init=1,
        min_scale=2.0**-126,
        max_scale=2.0**126,
        growth_interval=1,
        growth_factor=1e30,
        backoff_factor=1e-30,
    )
    scale = LossScale(config, CPU)
    values = follow(scale, [OVERFLOW if limit < 1 else CLEAN] * 200)
    assert values[-1] == limit
    assert math.isfinite(1 / scale.value.item())
    assert (1 / scale.value).item() > 0


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("init", 0.0, r"2\^-126 to 2\^126"),
        ("init", math.nan, r"2\^-126 to 2\^126"),
        ("min_scale", 1e-40, r"2\^-126 to 2\^126"),
        ("max_scale", math.inf, r"2\^-126 to 2\^126"),
        ("max_scale", 1.0, "between min_scale 1 and max_scale 1"),
        ("growth_factor", 1.0, "finite number above 1"),
        ("growth_factor", math.inf, "finite number above 1"),
        ("growth_factor", math.nan, "finite number above 1"),
        ("backoff_factor", 0.0, "between 0 and 1"),
        ("backoff_factor", 1.0, "between 0 and 1"),
        ("growth_interval", 0, "1 or more"),
        ("hysteresis", 0, "1 or more"),
    ],
)
def test_contradictory_rules_are_refused(name: str, value: Any, problem: str) -> None:
    setting = "init" if problem.startswith("between min_scale") else name
    with pytest.raises(ConfigError, match=rf"precision\.loss_scale\.{setting} = .*{problem}"):
        LossScaleConfig(**{name: value})


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        (LossScaleConfig(init=16, max_scale=64), 65536.0, 64),
        (LossScaleConfig(init=16, min_scale=8), 2.0, 8),
        (LossScaleConfig(dynamic=False, init=16), 2.0, 16),
        (LossScaleConfig(init=0.1, min_scale=0.1, max_scale=0.1), 0.5, 0.1),
    ],
)
def test_configuration_overrides_a_loaded_state(
    config: LossScaleConfig,
    stored: float,
    expected: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scale = LossScale(config, CPU)
    count = torch.tensor(3)
    state = {"clean_steps": count, "overflows_in_a_row": count}
    with caplog.at_level(logging.WARNING, logger="distmp"):
        scale.load_state_dict({"value": torch.tensor(stored), **state})
    assert scale.value == torch.tensor(float(expected))
    assert f"loss scale {stored:g} of the loaded state becomes {expected:g}" in caplog.text
    caplog.clear()
    scale.load_state_dict({**scale.state_dict(), **state})
    assert caplog.text == ""


@pytest.mark.parametrize("stored", [0.0, math.nan, math.inf])
def test_state_without_scale_uses_the_initial_scale(stored: float) -> None:
    scale = LossScale(LossScaleConfig(init=16), CPU)
    count = torch.tensor(3)
    scale.load_state_dict(
        {"value": torch.tensor(stored), "clean_steps": count, "overflows_in_a_row": count}
    )
    assert (scale.value, scale.clean_steps, scale.overflows_in_a_row) == (16, 0, 0)


@pytest.mark.parametrize(
    ("wanted", "rules", "expected"),
    [
        (None, None, None),
        (None, LossScaleConfig(), None),
        ("dynamic", LossScaleConfig(init=8.0, hysteresis=3), None),
        ("dynamic", LossScaleConfig(init=8.0, dynamic=False), None),
        (8.0, LossScaleConfig(init=8.0, dynamic=False), None),
        (
            None,
            LossScaleConfig(dynamic=False, init=8.0),
            "precision.loss_scale.dynamic = False, init = 8.0: has no effect, there is no loss "
            "scale",
        ),
        (
            "dynamic",
            LossScaleConfig(init=8.0, dynamic=False, growth_interval=5),
            "precision.loss_scale.growth_interval = 5: has no effect, the loss scale is fixed at 8",
        ),
        (
            4.0,
            LossScaleConfig(hysteresis=2),
            "precision.loss_scale.hysteresis = 2: has no effect, the loss scale is fixed at 4",
        ),
    ],
)
def test_rules_without_effect_are_named(
    wanted: Any, rules: LossScaleConfig | None, expected: str | None
) -> None:
    assert unused_rules(wanted, rules) == expected
