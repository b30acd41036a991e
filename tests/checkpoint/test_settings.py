from __future__ import annotations

from typing import Any

import pytest

from distmp.checkpoint.settings import CheckpointConfig, Retention
from distmp.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("every", -1),
        ("keep", 0),
        ("keep", -2),
        ("keep_every", -1),
        ("path", ""),
    ],
)
def test_unusable_values_name_the_setting(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        CheckpointConfig(**{setting: value})
    assert error.value.setting == f"checkpoint.{setting}"


def test_smallest_usable_values() -> None:
    CheckpointConfig(every=0, keep=1, keep_every=0)


def test_which_stay() -> None:
    assert CheckpointConfig().retention == Retention(last=2, every=0)
    config = CheckpointConfig(keep=3, keep_every=1000)
    assert config.retention == Retention(last=3, every=1000)
