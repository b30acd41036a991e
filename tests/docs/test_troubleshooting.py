"""The messages that the page on troubleshooting quotes are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from benchmarks.figures import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [line.removeprefix("> ") for line in PAGE.splitlines() if line.startswith("> ")]


@cache
def literals() -> list[str]:
    """Return the texts in the package's code, with `...` for what is filled in."""
    found = []
    for path in (ROOT / "distmp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_in_the_code(quoted: str) -> bool:
    """Whether a text of the package's code holds what is quoted, with `...` for anything."""
    pattern = re.compile(".*".join(map(re.escape, quoted.split("..."))), re.DOTALL)
    return any(pattern.search(text) for text in literals())


@pytest.mark.parametrize("quoted", QUOTED)
def test_quoted_message_is_in_code(quoted: str) -> None:
    assert is_in_the_code(quoted)


def test_every_symptom_has_section() -> None:
    sections = re.findall(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    assert len(sections) >= 7
    assert len(QUOTED) >= 10
