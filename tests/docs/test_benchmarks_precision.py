"""The page on the costs of precision agrees with the commands that it describes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from distmp.commands.calibrate.choice import MOST_LAYERS

from benchmarks.figures import ROOT
from distmp.commands.calibrate.command import load
from distmp.commands.calibrate.comparison import DEVIATIONS
from distmp.commands.calibrate.settings import FORMATS, MAX_ERROR

PAGE = (ROOT / "docs" / "benchmarks-precision.md").read_text()
TEXT = " ".join(PAGE.split())


def test_the_commands_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    found = re.findall(r"^\.venv/bin/distmp calibrate (.*)$", PAGE, re.MULTILINE)
    assert len(found) == 2
    for options in found:
        load(shlex.split(options))


def test_the_rules_are_those_of_the_code() -> None:
    assert DEVIATIONS == 2
    assert "at most 2 standard deviations" in TEXT
    assert MOST_LAYERS == 0.5
    assert "more than half of the layers" in TEXT
    assert f"The default, {MAX_ERROR:g}," in TEXT
    assert f"({', '.join(FORMATS)}, then bfloat16)" in TEXT
