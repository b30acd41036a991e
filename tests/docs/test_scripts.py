"""Published scripts with the lines of docs/scripts.md: they apply, and train as the originals do.

Scripts that are not installed run if DISTMP_SCRIPTS names a directory with clones of them,
`nanogpt` and `accelerate`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from benchmarks.known_scripts import (
    FORMS,
    RANKS,
    SCRIPTS,
    Hunk,
    hunks,
    installed_trl,
    losses,
    replaced,
)
from benchmarks.report import RESULTS
from benchmarks.tables.scripts import largest_difference

PAGE = (ROOT / "docs" / "scripts.md").read_text()
RECORD = json.loads((RESULTS / "known-scripts-cpu.json").read_text())
CLONES = os.environ.get("DISTMP_SCRIPTS")
# The last digit of the losses that scripts print.
PRINTED = 1e-3


@pytest.mark.parametrize("name", SCRIPTS)
def test_recorded_losses_agree_with_original(name: str) -> None:
    found: dict[str, dict[str, list[float]]] = RECORD["scripts"][name]
    assert list(found) == [str(ranks) for ranks in RANKS]
    assert found["1"]["original"] != found["2"]["original"]
    for by_form in found.values():
        assert list(by_form) == list(FORMS)
        _check(by_form)
        in_float16, original = by_form["distmp, float16"], by_form["original"]
        for ours, theirs in zip(in_float16, original, strict=True):
            assert ours == pytest.approx(theirs, rel=0.02)


def _check(by_form: dict[str, list[float]]) -> None:
    original = by_form["original"]
    assert len(original) >= 10
    assert len({*original}) > len(original) / 2  # the losses change
    assert largest_difference(by_form) <= PRINTED


def test_record_uses_tested_versions() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    for package, version in RECORD["versions"].items():
        assert f"{package}=={version.partition('+')[0]}" in constraints


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCRIPTS)
def test_changed_script_trains_like_original(name: str) -> None:
    if name != "trl" and CLONES is None:
        pytest.skip("DISTMP_SCRIPTS names no directory with clones")
    repository = installed_trl() if name == "trl" else Path(str(CLONES)) / name
    forms = ("original", "distmp")
    _check({form: losses(SCRIPTS[name], repository, 2, form) for form in forms})


def test_page_changes_at_most_three_script_lines() -> None:
    for script in SCRIPTS.values():
        ours, _ = hunks(PAGE, script.title)
        added = [line for hunk in ours for line in hunk.new.splitlines() if line not in hunk.old]
        assert 1 <= len(added) <= 3
        assert any("distmp" in line for line in added)


def test_hunks_replace_unique_script_lines() -> None:
    page = "\n## A\ntext\n```diff\n a\n+b\n\n-  c\n+  d\n```\n```diff\n-e\n```\n## B\n"
    ours, for_cpus = hunks(page, "A")
    assert ours == [Hunk("a\n", "a\nb\n"), Hunk("  c\n", "  d\n")]
    assert for_cpus == [Hunk("e\n", "")]
    assert replaced("a\n  c\ne\n", [*ours, *for_cpus]) == "a\nb\n  d\n"
    for text in ("a\n", "a\n  c\n  c\n"):
        with pytest.raises(ValueError, match="not in the script exactly once: '  c"):
            replaced(text, ours)
