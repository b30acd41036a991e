"""Both forms of the scripts: upstream's fails as the README says, that with distmp passes."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from tests.ranks import run_ranks
from tests.upstream.forms import with_distmp

HERE = Path(__file__).parent
CONSTRAINTS = (HERE.parent.parent / "constraints.txt").read_text().splitlines()
MAX_CHANGED_LINES = 3


class Row(NamedTuple):
    """A line of the README's table."""

    script: str
    package: str
    version: str
    failure: str
    changed_lines: int

    @property
    def text(self) -> str:
        return (HERE / "scripts" / f"{self.script}.py").read_text()


ROWS = [
    Row(*row[:4], int(row[4]))
    for row in re.findall(
        r"^\| \[(\w+)\]\(scripts/\1\.py\) \| .* \| (\w+) ([\d.]+) \| .* \| `(.*)` \| (\d) \|$",
        (HERE / "README.md").read_text(),
        re.MULTILINE,
    )
]


def test_the_readme_lists_every_script_with_version_and_changed_lines() -> None:
    assert [row.script for row in ROWS] == [*dict.fromkeys(row.script for row in ROWS)]
    assert {row.script for row in ROWS} == {path.stem for path in (HERE / "scripts").glob("*.py")}
    for row in ROWS:
        assert f"{row.package}=={row.version}" in CONSTRAINTS
        text, changed = with_distmp(row.text)
        assert changed == row.changed_lines <= MAX_CHANGED_LINES
        assert "distmp" not in re.sub(r"# distmp.*", "", row.text)
        assert "import distmp" in text or "from distmp" in text


def outcomes(rows: list[Row]) -> list[tuple[str, str]]:
    """Return how both forms of each script end on this rank; the empty text is success."""
    return [(_outcome(row.text), _outcome(with_distmp(row.text)[0])) for row in rows]


def _outcome(text: str) -> str:
    # torchrun sets the variable, and accelerate reads it. Trainers change others.
    try:
        with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1"):
            exec(compile(text, "script", "exec"), {"__name__": "__main__"})
    except Exception as error:  # noqa: BLE001  (it is what the test is about)
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "of_torch",
    [pytest.param(True, id="torch"), pytest.param(False, id="trainers", marks=pytest.mark.nightly)],
)
def test_scripts_fail_upstream_and_pass_with_distmp(of_torch: bool) -> None:
    rows = [row for row in ROWS if (row.package == "torch") is of_torch]
    for found in run_ranks(outcomes, 2, rows):
        for row, (upstream, ours) in zip(rows, found, strict=True):
            assert ours == "", row.script
            if version(row.package).partition("+")[0] == row.version:
                assert row.failure in upstream, row.script


def test_a_mark_replaces_the_next_line_or_adds_one() -> None:
    text = "a\n# distmp adds: b\n    # distmp: c\n    d  # e\nf\n"
    assert with_distmp(text) == ("a\nb\n    c\nf\n", 2)
    for wrong in ("# distmp: a\n# distmp: b\nc\n", "# distmp: a\n\nb\n", "# distmp: a\n"):
        with pytest.raises(ValueError, match="nothing to replace"):
            with_distmp(wrong)
