"""The table of checks on the page is the one of the code."""

from __future__ import annotations

import importlib.util

from benchmarks.figures import ROOT

PAGE = (ROOT / "docs" / "checks.md").read_text()


def test_the_table_is_generated() -> None:
    spec = importlib.util.spec_from_file_location("check_table", ROOT / ".ci" / "check_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.with_table(PAGE) == PAGE
