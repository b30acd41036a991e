from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.checkpoint.settings import CheckpointConfig, Retention
from distmp.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "value"),
    [("every", -1), ("keep", 0), ("keep", -2), ("keep_every", -1), ("keep_every", 1), ("path", "")],
)
def test_unusable_values_name_the_setting(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        CheckpointConfig(**{setting: value})
    assert error.value.setting == f"checkpoint.{setting}"


def test_smallest_usable_values_are_accepted() -> None:
    CheckpointConfig(every=0, keep=1, keep_every=0)


def staying(retention: Retention, steps: list[int]) -> list[int]:
    """Save at each of the steps and return the remaining checkpoints."""
    left: list[int] = []
    for step in steps:
        left.append(step)
        going = retention.surplus(left, (), {})
        assert going == sorted(going)
        left = [other for other in left if other not in going]
    return left


def test_last_checkpoints_stay() -> None:
    assert staying(Retention(last=1), [10, 20, 30]) == [30]
    assert staying(Retention(last=2), [10, 20, 30]) == [20, 30]
    assert staying(Retention(last=9), [10, 20, 30]) == [10, 20, 30]


def test_every_nth_step_stays_permanently() -> None:
    steps = list(range(10, 110, 10))
    assert staying(Retention(last=2, every=30), steps) == [30, 60, 90, 100]
    assert staying(Retention(last=1, every=100), steps) == [100]


def test_first_checkpoint_after_every_nth_step_stays() -> None:
    assert staying(Retention(last=1, every=100), [40, 80, 120, 160, 200, 310, 390]) == [
        120, 200, 310, 390,
    ]  # fmt: skip


@given(
    steps=st.sets(st.integers(0, 200), min_size=1), last=st.integers(1, 5), every=st.integers(0, 60)
)
def test_retention_agrees_with_reference(steps: set[int], last: int, every: int) -> None:
    left = steps - set(Retention(last, every).surplus(steps, (), {}))
    for_good = {
        step
        for step in steps
        if every and step >= every and not any(step // every * every <= s < step for s in steps)
    }
    assert left == for_good | set(sorted(steps)[-last:])
