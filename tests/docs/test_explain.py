"""The page on `distmp explain` agrees with the code."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks.figures import ROOT
from distmp.commands.explain import command
from distmp.commands.explain.explanation import MICROBATCHES_RUN, REPRODUCIBLE_RUN

PAGE = (ROOT / "docs" / "explain.md").read_text()


def test_commands_of_page_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^distmp explain (.*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 3
    for line in commands:
        assert command.ExplainConfig.load(shlex.split(line)).world_size


def test_page_numbers_agree_with_code() -> None:
    assert (MICROBATCHES_RUN, REPRODUCIBLE_RUN) == (3, 4)
    assert "runs three (four with `reproducible`)" in " ".join(PAGE.split())
    assert command.USUAL_RANKS == 8
    assert "by default 8, or the largest smaller divisor" in " ".join(PAGE.split())
