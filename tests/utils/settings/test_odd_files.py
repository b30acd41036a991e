"""A configuration that is no small, regular file is one message."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distmp.errors import ConfigError
from distmp.utils.settings import read_yaml


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "cannot be read \\(Not a regular file\\)"),
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read \\(Not a regular file\\)"),
        (lambda path: path.symlink_to(path.name), "cannot be read"),
        (text("# comment\n" * 3_000_000), "30000000 bytes, more than 262144"),
        (text("[" * 100_000), "is not valid YAML"),
    ],
    ids=["pipe", "device", "loop", "comments", "deep"],
)
def test_odd_files(make: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    make(path)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_yaml(path)
    assert len(str(caught.value)) < 500


def test_aliases_that_mean_what_they_say_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: *a\n")
    expected = {"a": {"x": 1, "y": [2]}, "b": {"x": 3, "y": [2]}, "c": {"x": 1, "y": [2]}}
    assert read_yaml(path) == expected
