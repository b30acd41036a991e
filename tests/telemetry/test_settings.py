from __future__ import annotations

from typing import Any

import pytest

from distmp.errors import ConfigError
from distmp.telemetry.settings import LogConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 0}, "log.every = 0: use 1 or more"),
        ({"console": "plane"}, "log.console = 'plane': did you mean 'plain'?"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LogConfig(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("console", ["auto", "live", "plain", "off"])
def test_accepts_every_mode(console: Any) -> None:
    assert LogConfig(every=1, console=console).console == console
