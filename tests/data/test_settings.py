from __future__ import annotations

from typing import Any

import pytest

from distmp.data.settings import DataConfig
from distmp.errors import ConfigError


def test_defaults_are_valid() -> None:
    config = DataConfig()
    assert (config.source, config.path, config.sequence_length) == ("text", None, 256)
    assert not config.is_import_path


@pytest.mark.parametrize(
    ("values", "setting", "message"),
    [
        ({"source": "txt"}, "data.source", "did you mean 'text'"),
        ({"source": "tokens"}, "data.path", "name the directory"),
        ({"path": ""}, "data.path", "name a directory, or null"),
        ({"pattern": ""}, "data.pattern", "glob"),
        ({"pattern": "/a/*.txt"}, "data.pattern", "relative to data.path"),
        ({"sequence_length": 0}, "data.sequence_length", "at least 1"),
        ({"held_out": 1.0}, "data.held_out", "share"),
        ({"held_out": -0.1}, "data.held_out", "share"),
        ({"held_out": float("nan")}, "data.held_out", "share"),
        ({"workers": -1}, "data.workers", "from 0 to 512"),
        ({"options": {"a": 1}}, "data.options", "only an import path"),
        (
            {"source": "m:f", "path": "a"},
            "data.path",
            "is not passed to 'm:f'; pass it in data.opt",
        ),
        ({"source": "m:f", "options": {"split": 1}}, "data.options", "'split' is passed by"),
    ],
)
def test_invalid_values_are_refused(values: dict[str, Any], setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        DataConfig(**values)
    assert caught.value.setting == setting
