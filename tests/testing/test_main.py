"""`python -m distmp.testing`, which prints reports of audits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distmp.testing.__main__ import main

RIGHT = {"ranks": 2, "steps": 2, "mismatches": [], "undecided": [], "collectives": {"sum": 1}}
WRONG = {**RIGHT, "mismatches": [["clipped", "weight: clipped"]]}
UNDECIDED = {**RIGHT, "undecided": ["compiled"]}


def test_exit_code_is_that_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main([str(file)]) == 3
    assert "report.json is not the report of an audit" in capsys.readouterr().err
    for report, code, state in ((WRONG, 1, "wrong"), (UNDECIDED, 2, "not"), (RIGHT, 0, "right")):
        file.write_text(json.dumps(report))
        assert main([str(file)]) == code
        assert f"gradient {state}" in capsys.readouterr().out


def test_help_and_no_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in (([], 3), (["a", "b"], 3), (["--help"], 0)):
        assert main(arguments) == code
    assert "3 if there is no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ("[1]", "must be a mapping, not list"),
        ({"ranks": 2}, "missing 4 required positional arguments: 'steps', 'mismatches'"),
        ({**RIGHT, "loss": 1}, "unexpected keyword argument 'loss'"),
        ({**RIGHT, "collectives": [1]}, "collectives = [1]: must be"),
        ({**RIGHT, "mismatches": [["x"]]}, "mismatches = [['x']]: must be a list, each item"),
        ({**RIGHT, "mismatches": "abc"}, "mismatches = 'abc': must be a list"),
        ({**RIGHT, "undecided": None}, "undecided = None: must be a list"),
        ({**RIGHT, "steps": "many"}, "steps = 'many': must be an integer"),
    ],
)
def test_what_is_not_a_report_is_one_line_and_exit_code_3(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert main([str(file)]) == 3
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
