"""The pages on resuming and exporting agree with the code."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks.figures import ROOT
from distmp.config import RunConfig, load
from distmp.export.files import MAX_SHARD_SIZE
from distmp.training.resume_compat import all_rules, compare
from distmp.utils.settings import leaf_names

PAGE = (ROOT / "docs" / "resume.md").read_text()
EXPORT = (ROOT / "docs" / "export.md").read_text()


def flat(config: RunConfig) -> dict[str, object]:
    found = {}
    for name in leaf_names(RunConfig):
        value: object = config
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value
    return found


def test_the_changes_are_told_as_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = re.findall(r"^\.venv/bin/distmp train (--run-dir runs/pages .*)$", PAGE, re.MULTILINE)
    first, second = (flat(load(shlex.split(line))) for line in lines)
    shown = re.findall(r"^    (changed: .*)$", PAGE, re.MULTILINE)
    assert len(shown) == 2
    found = compare(first, second)
    assert [f"changed: {line}" for line in found.consequential.values()] == shown
    assert found.harmless == found.dangerous == {}


def test_the_examples_of_the_table_stand_where_they_belong() -> None:
    rows = re.findall(r"^\| (?:rounding|training|the run).*\| .* \| (.*) \|$", PAGE, re.MULTILINE)
    kinds = ("harmless", "consequential", "dangerous")
    assert len(rows) == len(kinds)
    for row, kind in zip(rows, kinds, strict=True):
        examples = re.findall(r"`([\w.]+)`", row)
        assert examples
        for example in examples:
            of_it = [name for name in leaf_names(RunConfig) if f"{name}.".startswith(f"{example}.")]
            assert of_it
            assert {all_rules()[name].kind for name in of_it} == {kind}, example


def test_the_size_of_a_file_is_that_of_the_code() -> None:
    assert f"several files of up to {MAX_SHARD_SIZE // 10**9} GB" in EXPORT
