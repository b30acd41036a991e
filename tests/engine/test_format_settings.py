"""The settings of formats that change during a run."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.config import PrecisionConfig, RunConfig
from distmp.engine.config import EngineConfig
from distmp.engine.format_schedule import check_policy, phase_formats
from distmp.engine.format_settings import (
    GuardConfig,
    PrecisionPhase,
    active_phase,
    check_order,
    in_steps,
    parse_phases,
)
from distmp.engine.settings import DivergenceConfig
from distmp.errors import ConfigError
from distmp.precision import policy
from distmp.utils.settings import from_mapping, to_mapping


@given(
    st.lists(st.integers(0, 30), unique=True, max_size=4),
    st.lists(st.integers(1, 3000), unique=True, max_size=3),
    st.integers(0, 40),
    st.integers(0, 3000),
)
def test_the_last_phase_that_has_begun_counts(
    steps: list[int], tokens: list[int], step: int, weight: int
) -> None:
    phases = [PrecisionPhase(after_steps=number) for number in sorted(steps)]
    phases += [PrecisionPhase(after_tokens=float(number)) for number in sorted(tokens)]
    found = active_phase(phases, step, float(weight))
    if any(number <= weight for number in tokens):
        assert found == len(steps) + sum(number <= weight for number in tokens)
    else:
        assert found == sum(number <= step for number in steps)


@given(st.integers(1, 999), st.integers(2, 10**6))
def test_a_fraction_is_the_decimal_number_that_was_written(thousandths: int, steps: int) -> None:
    phase = PrecisionPhase(after_fraction=float(f"0.{thousandths:03}"), forward="bf16")
    first = math.ceil(Fraction(thousandths, 1000) * steps)
    if first >= steps:
        with pytest.raises(ConfigError, match="never begins"):
            in_steps([phase], steps)
    else:
        assert in_steps([phase], steps) == (PrecisionPhase(after_steps=first, forward="bf16"),)


WRONG_PHASES: list[tuple[dict[str, Any], str]] = [
    ({"forward": "bf16"}, "has no beginnings; give one of after_steps"),
    ({"after_steps": 3, "after_tokens": 1e9}, "has 2 beginnings; give one of after_steps"),
    ({"after_steps": -1}, "precision.phases.after_steps = -1: use 0 or more steps"),
    ({"after_steps": 0.9}, "precision.phases.after_steps = 0.9: must be an integer or None"),
    ({"after_tokens": 0}, "precision.phases.after_tokens = 0: use a number above 0"),
    ({"after_fraction": 10}, "after_fraction = 10: use a number between 0 and 1, such as 0.9"),
    ({"after_steps": 1, "forward": "fp8"}, "forward = 'fp8': choose one of e4m3, e5m2, e2m1"),
    ({"from": 0.9, "forward": "bf16"}, "precision.phases.from = 0.9: unknown setting; give one of"),
    ({"after_steps": 1, "foward": "bf16"}, "unknown setting; did you mean 'forward'"),
    ({"after_steps": 1, "scaling": "row"}, "is no part of a phase: phases change the formats of"),
]


@pytest.mark.parametrize(("entry", "message"), WRONG_PHASES)
def test_a_wrong_phase_is_refused_with_one_message(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        PrecisionConfig(phases=(entry,))
    assert message in str(raised.value)


def test_phases_that_begin_in_another_order_are_refused() -> None:
    phases = [PrecisionPhase(after_steps=7, forward="bf16"), PrecisionPhase(after_steps=7)]
    with pytest.raises(ConfigError, match="begins no later than a phase above it"):
        check_order(phases)
    mixed = ({"after_fraction": 0.5, "forward": "bf16"}, {"after_steps": 400})
    with pytest.raises(ConfigError, match="begins no later than a phase above it"):
        RunConfig(steps=1000, precision=PrecisionConfig("fp8", phases=mixed))


def test_a_phase_after_the_end_of_the_run_is_refused() -> None:
    phases = ({"after_steps": 1000, "forward": "bf16"},)
    with pytest.raises(ConfigError, match="never begins: the run has 1000 steps"):
        RunConfig(steps=1000, precision=PrecisionConfig("fp8", phases=phases))


def test_an_own_loop_has_no_fractions() -> None:
    phase = PrecisionPhase(after_fraction=0.9, forward="bf16")
    with pytest.raises(ConfigError, match="does not know the number of steps of your loop"):
        EngineConfig(policy="fp8", precision_phases=(phase,))


def test_phases_of_policies_that_do_not_have_these_formats_are_refused() -> None:
    later = {"after_steps": 5}
    cases = [
        ("bf16", later, "the policy bf16 has no narrow products to change"),
        ("fp8", later, "changes nothing: the formats before it are forward=e4m3, grad=e5m2"),
        ("fp8", later | {"grad": "e2m1"}, "precision.phases.grad = 'e2m1': 4 bits need the scales"),
        ("nvfp4", later | {"grad": "e5m2"}, "scaling=block16 is for e2m1"),
    ]
    for name, entry, message in cases:
        with pytest.raises(ConfigError) as raised:
            phase_formats(policy(name), parse_phases([entry]))
        assert message in str(raised.value)
        with pytest.raises(ConfigError):
            PrecisionConfig(name, phases=(entry,)).check_names()
    found = phase_formats(policy("fp8"), parse_phases([later | {"forward": "bf16"}]))
    assert [(each.forward, each.grad, each.wgrad) for each in found] == [
        ("e4m3", "e5m2", "e5m2"),
        (None, "e5m2", "e5m2"),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"saturated": 1.5}, "precision.guard.saturated = 1.5: use a share from 0 to below 1"),
        ({"underflowed": -0.1}, "precision.guard.underflowed = -0.1: use a share"),
        ({"saturated": 0.1, "steps": 0}, "precision.guard.steps = 0: use 1 or more steps"),
        ({"saturated": 0.1, "steps": 2**63 - 1}, "use 1 or more steps, and at most 2^40"),
        ({"saturated": 0.1, "widen": "layers"}, "widen = 'layers': did you mean 'layer'"),
        ({"steps": 7}, "precision.guard.steps = 7: has no effect without saturated, underflowed"),
    ],
)
def test_a_wrong_guard_is_refused_with_one_message(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        GuardConfig(**values)
    assert message in str(raised.value)


def test_a_guard_against_spikes_needs_spikes() -> None:
    guard = GuardConfig(on_spike=True)
    with pytest.raises(ConfigError, match="needs the spike check"):
        EngineConfig(policy="fp8", precision_guard=guard)
    rollback = DivergenceConfig(on_spike="rollback")
    with pytest.raises(ConfigError, match="has no effect with a rollback"):
        RunConfig(precision=PrecisionConfig("fp8", guard=guard), divergence=rollback)
    with pytest.raises(ConfigError, match=r"has no narrow products that precision\.guard could"):
        check_policy(policy("bf16"), (), guard)
    RunConfig(precision=PrecisionConfig("fp8", guard=guard)).check_names()


def test_a_guard_without_a_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"never widens anything; set saturated"):
        EngineConfig(policy="fp8", precision_guard=GuardConfig())
    assert RunConfig(precision=PrecisionConfig("fp8")).engine(1).precision_guard is None


def test_one_phase_is_no_list() -> None:
    phase: Any = PrecisionPhase(after_steps=5)
    with pytest.raises(ConfigError, match=r"must be a list of PrecisionPhase$"):
        EngineConfig(policy="fp8", precision_phases=phase)


def test_settings_in_a_file_are_those_of_the_engine() -> None:
    values = {
        "steps": 1000,
        "precision": {
            "policy": "fp8",
            "phases": [{"after_steps": 10, "wgrad": "bf16"}, {"after_fraction": 0.9}],
            "guard": {"underflowed": 0.2, "widen": "product"},
        },
    }
    config = from_mapping(RunConfig, values)
    assert from_mapping(RunConfig, to_mapping(config)) == config
    engine = config.engine(microbatches=1)
    assert engine.precision_guard == GuardConfig(underflowed=0.2, widen="product")
    assert engine.precision_phases == (
        PrecisionPhase(after_steps=10, wgrad="bf16"),
        PrecisionPhase(after_steps=900),
    )
    described = engine.describe()
    assert "after_steps=900" in described["precision_phases"]
    assert described["precision_guard.underflowed"] == "0.2"
