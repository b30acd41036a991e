"""The README and the pages of docs/ say what is so; .ci/readme_commands.py runs their commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from benchmarks.figures import with_figures
from distmp.config import RunConfig
from distmp.precision import PRESETS
from distmp.utils.settings import from_mapping

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


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


def test_every_file_that_is_named_exists() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"(?:--config|accelerate launch [^\n]*?) ((?:configs|examples)/\S+)", text)
    assert named
    for path in named:
        assert (ROOT / path).is_file(), path
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for path in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_shown_are_settings(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether a logger is installed does not matter here.
    monkeypatch.setattr("distmp.telemetry.trackers.find", lambda name: name)
    for block in blocks("yaml", page.read_text()):
        from_mapping(RunConfig, yaml.safe_load(block))
