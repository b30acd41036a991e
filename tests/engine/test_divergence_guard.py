from __future__ import annotations

import dataclasses
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmp.engine import divergence_guard as divergence
from distmp.engine.divergence_guard import DivergenceConfig, DivergenceGuard
from distmp.errors import ConfigError
from distmp.scaling.step_decision import StepDecision, decide_step

CPU = torch.device("cpu")


def decision(
    loss: float, norm: float, *, overflow: bool = False, empty: bool = False
) -> StepDecision:
    square = math.inf if overflow else norm**2
    sums = torch.tensor([square, loss, 0 if empty else 1, 0, 0], dtype=torch.float64)
    return decide_step(sums, torch.tensor(1.0), nominal_weight=1.0, max_norm=None)


def reference_limits(
    seen: list[tuple[float, float]], config: DivergenceConfig, window: int
) -> tuple[float, float]:
    """Return the limits, computed with numpy from all usable (loss, norm) so far."""
    if len(seen) < config.warmup_steps:
        return math.inf, math.inf
    losses = np.array([loss for loss, _ in seen[-window:]])
    norms = np.log([norm for _, norm in seen[-window:]])

    def median(values: np.ndarray) -> float:
        return float(np.sort(values)[(len(values) - 1) // 2])

    def deviation(values: np.ndarray) -> float:
        return 1.4826 * median(np.abs(values - median(values)))

    loss = median(losses)
    loss_limit = loss + config.threshold * max(deviation(losses), 0.01 * abs(loss))
    norm_limit = median(norms) + config.threshold * max(deviation(norms), 0.05)
    return loss_limit, math.exp(norm_limit)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]),
            st.floats(1e-6, 1e6) | st.sampled_from([0.0, math.nan, math.inf]),
            st.sampled_from(["", "", "", "overflow", "empty"]),
        ),
        st.tuples(st.floats(2, 3), st.floats(0.5, 2), st.just("")),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, warmup=st.integers(1, 12), window=st.integers(1, 9))
def test_limits_are_those_of_a_plain_reference(
    steps: list[tuple[float, float, str]], warmup: int, window: int
) -> None:
    config = DivergenceConfig(on_spike="skip", warmup_steps=warmup, threshold=3)
    with mock.patch.object(divergence, "WINDOW", window):
        guard = DivergenceGuard(config, CPU)
        usable: list[tuple[float, float]] = []
        for loss, norm, kind in steps:
            step = decision(loss, norm, overflow=kind == "overflow", empty=kind == "empty")
            found = guard.check(step)
            expected = reference_limits(usable, config, window)
            limits = (float(found.loss_limit), float(found.norm_limit))
            assert limits == pytest.approx(expected, rel=1e-9)
            counts = not kind and math.isfinite(loss) and math.isfinite(norm) and norm > 0
            if counts and all(
                abs(value - limit) > 1e-9 * abs(limit)
                for value, limit in zip((loss, norm), limits, strict=True)
                if math.isfinite(limit)
            ):
                spike = loss > limits[0] or norm > limits[1]
                assert (bool(found.spike), bool(found.skip)) == (spike, spike or False)
            if not counts:
                assert not found.spike
                # An empty step has no mean loss.
                assert bool(found.skip) == (kind == "empty" or not math.isfinite(loss))
            guard.remember(step)
            if counts:
                usable.append((loss, norm))
            # Another spike check continues from the state.
            if len(usable) % 5 == 0:
                another = DivergenceGuard(config, CPU)
                another.load_state_dict(guard.state_dict())
                guard = another


@pytest.mark.parametrize("action", ["ignore", "warn", "skip", "rollback"])
def test_only_on_spike_skip_skips_the_update(action: str) -> None:
    config = DivergenceConfig(action, warmup_steps=2)  # type: ignore[arg-type]
    guard = DivergenceGuard(config, CPU)
    for loss in (2.0, 2.1, 1.9):
        guard.remember(decision(loss, 1.0))
    for bad in (decision(50.0, 1.0), decision(2.0, 50.0)):
        found = guard.check(bad)
        assert bool(found.spike) == (action != "ignore")
        assert bool(found.skip) == (action == "skip")
        assert float(bad.skipping(found.skip).found_inf) == (action == "skip")
    found = guard.check(decision(math.nan, 1.0))
    assert not found.spike
    assert bool(found.skip) == (action != "rollback")


def test_limits_are_robust_to_a_third_of_spikes() -> None:
    guard = DivergenceGuard(DivergenceConfig(), CPU)
    generator = np.random.default_rng(1)
    for _ in range(200):
        guard.remember(decision(2 + 0.02 * generator.standard_normal(), 1.0))
    before = float(guard.check(decision(2.0, 1.0)).loss_limit)
    for _ in range(divergence.WINDOW // 3):
        step = decision(9.0, 1.0)
        assert guard.check(step).spike
        guard.remember(step)
    assert float(guard.check(decision(2.0, 1.0)).loss_limit) < before + 0.3
    # A run that stays at its level has no spikes.
    for _ in range(divergence.WINDOW // 3):
        guard.remember(decision(9.0, 1.0))
    assert not guard.check(decision(9.0, 1.0)).spike


def test_guard_without_rules_finds_no_spike() -> None:
    guard = DivergenceGuard(None, CPU)
    for loss in (2.0, 900.0, math.nan):
        found = guard.check(decision(loss, loss))
        assert not found.spike
        assert not found.skip
        assert math.isinf(found.loss_limit)
        guard.remember(decision(loss, loss))
    assert not guard.state_dict()["values"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"on_spike": "stop"},
            "divergence.on_spike = 'stop': must be one of 'ignore', 'warn', 'skip', 'rollback'",
        ),
        ({"threshold": 0.0}, "divergence.threshold = 0.0: use a number above 0"),
        ({"threshold": math.nan}, "divergence.threshold = nan: use a number above 0"),
        ({"warmup_steps": 0}, "divergence.warmup_steps = 0: use 1 or more steps"),
    ],
)
def test_settings_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DivergenceConfig(**options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)
    assert dataclasses.asdict(DivergenceConfig())["on_spike"] == "warn"
