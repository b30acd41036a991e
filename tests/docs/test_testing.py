"""The table of classes on the page about gradients is that of the code."""

from __future__ import annotations

import re

from benchmarks.figures import ROOT
from distmp.testing.classify import CLASSES


def test_the_page_has_every_class() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", page, re.MULTILINE)
    assert dict(rows) == {kind: text for kind, text in CLASSES.items() if kind != "right"}
    assert [kind for kind, _ in rows] == [*CLASSES][1:]
