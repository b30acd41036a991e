"""The table of classes and the picture on the page about gradients are those of the code."""

from __future__ import annotations

import re

import pytest

from benchmarks.figures import ROOT
from distmp.testing.classify import CLASSES
from tests.ranks import run_ranks
from tests.testing.figure import PICTURE, panels


def test_the_page_has_every_class() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|.*?\| (.+) \|$", page, re.MULTILINE)
    assert [kind for kind, _, _ in rows] == [*CLASSES][1:]
    for kind, text, advice in rows:
        assert text == CLASSES[kind][0]
        assert advice.replace("`", "").startswith(CLASSES[kind][1])


@pytest.mark.nightly
def test_the_picture_has_the_sizes_of_the_code() -> None:
    shown = re.findall(r">(\w+(?:: [\d.e-]+ off)?)</text>", PICTURE.read_text())
    assert shown == [panel.title for panel in run_ranks(panels, 2)[1]]
