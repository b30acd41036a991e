"""A configuration that is no small, regular file, or means more than it says, is one message."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distmp.errors import ConfigError
from distmp.utils.settings import read_yaml
from distmp.utils.settings.yaml_files import dictionary_from_line

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "cannot be read \\(Not a regular file\\)"),
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read \\(Not a regular file\\)"),
        (lambda path: path.symlink_to(path.name), "cannot be read"),
        (text("# comment\n" * 3_000_000), "30000000 bytes, more than 262144"),
        (text(BOMB), "more than 100000 values, with those of aliases"),
        (text(MERGES), "more than 100000 values, with those of aliases"),
        (text("model: &a {options: *a}"), "more than 100000 values"),
        (text("[" * 100_000), "is nested too deeply to be read"),
    ],
    ids=["pipe", "device", "loop", "comments", "aliases", "merges", "itself", "deep"],
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


def test_deep_options_on_the_command_line() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        dictionary_from_line("{a: " * 5000 + "1" + "}" * 5000)
