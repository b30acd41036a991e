"""The code that seeded bugs change still exists, and all bugs were found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversary import cuda_mutants, mutants
from tests.adversary.mutants import ROOT, Mutant, bug_of, rows_of


@pytest.mark.parametrize(
    "mutant", [*mutants.MUTANTS, *cuda_mutants.MUTANTS], ids=lambda mutant: mutant.bug
)
def test_its_place_occurs_once(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1, "the source has changed: put the bug in elsewhere"
    assert mutant.old != mutant.new


@pytest.mark.parametrize(
    ("table", "known"),
    [(mutants.TABLE, mutants.MUTANTS), (cuda_mutants.TABLE, cuda_mutants.MUTANTS)],
    ids=["oracle and misuse", "fake devices"],
)
def test_the_table_has_all_of_them_found(table: Path, known: list[Mutant]) -> None:
    rows = rows_of(table)
    assert [bug_of(row) for row in rows] == [mutant.bug for mutant in known]
    assert not any("not found" in row for row in rows)
