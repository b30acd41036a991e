"""Import paths of the previous release."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from distmp._moved import MOVED
from tests.torchrun import environment


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module_of_today_and_warns(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=rf"{old} is now {MOVED[old]}; the old name will be"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])


def test_modules_of_an_old_package_are_those_of_today() -> None:
    with pytest.warns(FutureWarning, match="is now distmp.commands.explain.explanation"):
        from distmp.explain.explanation import explain  # type: ignore[import-not-found]
    assert explain is importlib.import_module("distmp.commands.explain.explanation").explain


def test_the_warning_names_the_line_that_imports(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import distmp\nfrom distmp.accelerate import Accelerator\n")
    sys.modules.pop("distmp.accelerate", None)
    with pytest.warns(FutureWarning, match="distmp.accelerate is now") as warnings:
        runpy.run_path(str(script))
    assert [(entry.filename, entry.lineno) for entry in warnings] == [(str(script), 2)]


@pytest.mark.parametrize("old", ["distmp.calibrate", "distmp.preflight"])
def test_an_old_path_runs_as_a_program(old: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", old, "--help"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: distmp ")
    assert f"{old} is now {MOVED[old]}" in done.stderr
