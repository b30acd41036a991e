"""The README says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.figures import with_figures
from distmp.precision import PRESETS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert "applied_total=20" in capsys.readouterr().out


def test_the_tree_exists() -> None:
    (tree,) = blocks("text")
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        folder = ROOT if not line.startswith(" ") else ROOT / "distmp"
        assert (folder / name).exists(), name


def test_the_table_of_policies_is_complete() -> None:
    for name, preset in PRESETS.items():
        (row,) = re.findall(rf"^\| `{name}` .*$", README, flags=re.MULTILINE)
        assert str(preset.compute_dtype).removeprefix("torch.") in row
        assert ("dynamic" in row) == (preset.loss_scale == "dynamic")
        assert ("master" in row) == preset.has_masters
        assert ("TF32" in row) == preset.tf32


def test_the_figures_are_those_of_the_results() -> None:
    assert with_figures(README) == README


def test_every_file_that_commands_name_exists() -> None:
    named = re.findall(r"--config (\S+)", "\n".join(blocks("bash")))
    assert named
    for path in named:
        assert (ROOT / path).is_file(), path
