"""Writes the list of checks with a setting into docs/checks.md: `python .ci/check_table.py`.

Defaults and descriptions are those of the code.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "checks.md"
ENGINE = "EngineConfig"
# Class and field of a setting; when it checks, its cost, and the value that disables it.
CHECKS = {
    (ENGINE, "first_step_checks"): ("in the first step", "once", "False"),
    (ENGINE, "max_consecutive_skips"): ("in each step", "none", "a large number"),
    (ENGINE, "attribution"): ("after an overflow", "a repeated step", "False"),
    ("DivergenceConfig", "on_spike"): ("in each step", "none", "ignore"),
    ("RankConsistencyConfig", "every"): ("every n steps", "an all-reduce of digests", "0"),
    ("RunConfig", "preflight"): ("at the start", "a few seconds", "never"),
    ("RunConfig", "watchdog_seconds"): ("always", "a heartbeat each second", "0"),
}
SECTIONS = {"DivergenceConfig": "divergence.", "RankConsistencyConfig": "rank_consistency."}


def main() -> int:
    PAGE.write_text(with_table(PAGE.read_text()))
    return 0


def with_table(page: str) -> str:
    """Return a page with the list between its marks written again."""
    found, rows = fields(), []
    for (owner, name), (when, cost, off) in CHECKS.items():
        default, text = found[owner, name]
        setting = f"Engine({name}=...)" if owner == ENGINE else SECTIONS.get(owner, "") + name
        details = f"When: {when}. Cost: {cost}. Off: {off}."
        rows.append(f"- `{setting}`, default {default}: {text} {details}")
    marks = ("<!-- checks -->", "<!-- end of checks -->")
    written = "\n".join([marks[0], *rows, marks[1]])
    return re.sub(".*?".join(marks), lambda _: written, page, flags=re.DOTALL)


def fields() -> dict[tuple[str, str], tuple[str, str]]:
    """Return default and description of each field of `CHECKS`."""
    return {
        (owner.name, name): (_default(field), _text(text))
        for path in (ROOT / "distmp").rglob("*.py")
        for owner in ast.parse(path.read_text()).body
        if isinstance(owner, ast.ClassDef)
        for field, text in pairwise(owner.body)
        if isinstance(field, ast.AnnAssign)
        if (owner.name, name := ast.unparse(field.target)) in CHECKS
    }


def _default(field: ast.AnnAssign) -> str:
    value = field.value
    if isinstance(value, ast.Call):
        value = next(word.value for word in value.keywords if word.arg == "default")
    assert isinstance(value, ast.Constant)
    return "null" if value.value is None else str(value.value).lower()


def _text(text: ast.stmt) -> str:
    assert isinstance(text, ast.Expr)
    assert isinstance(text.value, ast.Constant)
    return " ".join(str(text.value.value).split())


if __name__ == "__main__":
    sys.exit(main())
