"""The code that seeded bugs change still exists."""

from __future__ import annotations

import pytest

from tests.adversary.mutants import MUTANTS, ROOT, TABLE, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_its_place_occurs_once(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1, "the source has changed: put the bug in elsewhere"
    assert mutant.old != mutant.new


def test_the_table_has_all_of_them_found() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if " | `distmp/" in line]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [m.bug for m in MUTANTS]
    assert not any("not found" in row for row in rows)
