"""The pages on checks quote messages of the code, and name a test of each."""

from __future__ import annotations

import re

import pytest

from benchmarks.figures import ROOT
from tests.docs.test_troubleshooting import is_in_the_code

PAGES = ("checks", "model-checks", "loop-checks", "extension-checks", "precision-checks")
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)
ROWS = re.findall(r"^\| (.+) \| (.+) \| \[(\w+)\]\(\.\./(\S+)\) \|$", PAGE, flags=re.MULTILINE)


def test_every_row_has_a_message_and_a_test() -> None:
    tables = [line for line in PAGE.splitlines() if line.startswith("|")]
    headings = 2 * PAGE.count("| check | message | test |")
    assert len(ROWS) == len(tables) - headings > 25


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_message_is_in_the_code_and_its_test_in_the_tests(row: tuple[str, ...]) -> None:
    _, message, test, path = row
    if not message.startswith("none"):
        (quoted,) = re.findall(r"^`(.+)`(?: \(warning\))?$", message)
        assert is_in_the_code(quoted)
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), flags=re.MULTILINE)
