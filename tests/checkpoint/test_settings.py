from __future__ import annotations

from typing import Any

import pytest

from distmp.checkpoint.settings import CheckpointConfig
from distmp.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("every", -1),
        ("keep", 0),
        ("keep", -2),
        ("every_minutes", -1.0),
        ("every_minutes", float("nan")),
        ("every_minutes", float("inf")),
        ("on_failure", "ignore"),
    ],
)
def test_unusable_values_name_the_setting(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        CheckpointConfig(**{setting: value})
    assert error.value.setting == f"checkpoint.{setting}"


def test_smallest_usable_values() -> None:
    CheckpointConfig(every=0, keep=1)
