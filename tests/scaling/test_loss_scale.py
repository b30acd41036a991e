from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmp.errors import ConfigError
from distmp.scaling import LossScale, LossScaleConfig

CPU = torch.device("cpu")


@dataclass
class PlainScale:
    """The rules in plain Python; like on the device, every product is rounded to FP32."""

    rules: LossScaleConfig
    value: float = 0.0
    clean: int = 0

    def __post_init__(self) -> None:
        self.value = float(np.float32(self.rules.init))

    def follow(self, *, overflow: bool, empty: bool) -> None:
        if empty:
            return
        if overflow:
            self.change(self.rules.backoff_factor)
            return
        self.clean += 1
        if self.clean >= self.rules.growth_interval:
            self.change(self.rules.growth_factor)

    def change(self, factor: float) -> None:
        product = float(np.float32(self.value) * np.float32(factor))
        self.value = float(
            np.float32(min(max(product, self.rules.min_scale), self.rules.max_scale))
        )
        self.clean = 0


@st.composite
def rules(draw: st.DrawFn) -> LossScaleConfig:
    low, init, high = sorted(draw(st.tuples(*[st.integers(-10, 30)] * 3)))
    return LossScaleConfig(
        init=2.0**init,
        min_scale=2.0**low,
        max_scale=2.0**high,
        growth_factor=draw(st.sampled_from([1.5, 2.0, 4.0])),
        backoff_factor=draw(st.sampled_from([0.25, 0.5, 0.7])),
        growth_interval=draw(st.integers(1, 4)),
    )


STEPS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40)


@settings(deadline=None)
@given(rules=rules(), steps=STEPS, save_after=st.integers(0, 40))
def test_scale_follows_the_rules_through_any_sequence(
    rules: LossScaleConfig, steps: list[tuple[bool, bool]], save_after: int
) -> None:
    scale, plain = LossScale(rules, CPU), PlainScale(rules)
    assert scale.value == plain.value
    for index, (overflow, empty) in enumerate(steps):
        if index == save_after:
            resumed = LossScale(rules, CPU)
            resumed.load_state_dict(scale.state_dict())
            scale = resumed
        scale.update(torch.tensor(overflow), torch.tensor(empty))
        plain.follow(overflow=overflow, empty=empty)
        assert (scale.value.item(), scale.clean_steps.item()) == (plain.value, plain.clean)
        assert scale.value.dtype == torch.float32
        assert scale.clean_steps.dtype == torch.int64


@settings(deadline=None)
@given(steps=STEPS)
def test_a_scale_without_rules_is_one_for_ever(steps: list[tuple[bool, bool]]) -> None:
    scale = LossScale(None, CPU)
    for overflow, empty in steps:
        scale.update(torch.tensor(overflow), torch.tensor(empty))
    scale.load_state_dict({"value": torch.tensor(64.0), "clean_steps": torch.tensor(3)})
    assert scale.value == 1


def test_scale_of_a_step_is_kept_by_whoever_took_it() -> None:
    scale = LossScale(LossScaleConfig(init=8), CPU)
    used = scale.value
    scale.update(torch.tensor(True), torch.tensor(False))
    assert (used, scale.value) == (8, 4)


@pytest.mark.parametrize(("stored", "expected"), [(64.0, 32), (2.0, 4), (16.0, 16)])
def test_loaded_scale_keeps_within_the_configured_limits(stored: float, expected: float) -> None:
    scale = LossScale(LossScaleConfig(init=8, min_scale=4, max_scale=32), CPU)
    scale.load_state_dict({"value": torch.tensor(stored), "clean_steps": torch.tensor(7)})
    assert scale.value == expected
    assert scale.clean_steps == 7


def test_scale_starts_anew_after_a_run_that_had_none() -> None:
    without, scale = LossScale(None, CPU), LossScale(LossScaleConfig(init=8), CPU)
    scale.load_state_dict({**without.state_dict(), "clean_steps": torch.tensor(7)})
    assert scale.value == 8
    assert scale.clean_steps == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"init": 0.0}, "init = 0.0"),
        ({"init": math.inf}, "init = inf"),
        ({"init": math.nan}, "init = nan"),
        ({"min_scale": -1.0}, "min_scale = -1.0"),
        ({"max_scale": math.inf}, "max_scale = inf"),
        ({"growth_factor": 1.0}, "growth_factor = 1.0"),
        ({"growth_factor": math.nan}, "growth_factor = nan"),
        ({"growth_factor": math.inf}, "growth_factor = inf"),
        ({"backoff_factor": 1.0}, "backoff_factor = 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor = 0.0"),
        ({"growth_interval": 0}, "growth_interval = 0"),
        ({"init": 4.0, "min_scale": 8.0}, "init = 4.0: must lie between min_scale 8.0"),
        ({"init": 4.0, "max_scale": 2.0}, "init = 4.0: must lie between .* max_scale 2.0"),
    ],
)
def test_rules_that_make_no_sense_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^precision\.loss_scale\.{named}"):
        LossScaleConfig(**fields)
