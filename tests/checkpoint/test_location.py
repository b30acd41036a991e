from __future__ import annotations

from pathlib import Path

import pytest

from distmp.checkpoint.storage import locate
from distmp.errors import ConfigError


def test_locate_accepts_paths() -> None:
    assert locate("resume", "runs/first") == Path("runs/first")


def test_urls_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is a URL; name .* that renames directories") as error:
        locate("checkpoint.path", "s3://bucket/run")
    assert error.value.setting == "checkpoint.path"
