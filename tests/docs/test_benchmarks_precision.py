"""The page on the costs of precision agrees with the commands that it describes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from distmp.commands.calibrate.command import load

PAGE = (ROOT / "docs" / "benchmarks-precision.md").read_text()


def test_the_commands_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    found = re.findall(r"^\.venv/bin/distmp calibrate (.*)$", PAGE, re.MULTILINE)
    assert found
    for options in found:
        load(shlex.split(options))
