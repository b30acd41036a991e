"""README, CONTRIBUTING and the pages of docs/ agree with the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.figures import with_figures
from distmp.config import RunConfig
from distmp.precision import PRESETS
from distmp.utils.settings import from_mapping
from distmp.utils.settings.yaml_files import read_yaml

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_readme_has_at_most_900_words(page: str) -> None:
    assert len(page.split()) <= 900


def test_readme_begins_with_problem_in_three_sentences() -> None:
    introduction = README.partition("\n## ")[0].partition("\n\n")[2]
    assert len(re.findall(r"\.(?:\s|$)", introduction)) == 3


def test_readme_examples_are_short() -> None:
    (engine,), (scaler,) = blocks("python", README), blocks("py", README)
    assert len([line for line in engine.splitlines() if line]) <= 10
    assert len(scaler.splitlines()) == 6


def test_readme_presets_agree_with_code() -> None:
    for name in PRESETS:
        assert f"`{name}`" in README


def test_page_figures_agree_with_results() -> None:
    assert with_figures(README) == README


def test_named_files_exist() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"(?:--config|accelerate launch [^\n]*?) ((?:configs|examples)/\S+)", text)
    assert named
    for path in named:
        assert (ROOT / path).is_file(), path
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for path in re.findall(r"\]\(([^)#:]+)[)#]", prose):
            assert (page.parent / path).exists(), path
    for path in re.findall(
        r"`((?:distmp|tests|benchmarks|configs|docs|\.ci)/[\w./]+)`", CONTRIBUTING
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_settings_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether a logger is installed does not matter here.
    monkeypatch.setattr("distmp.telemetry.trackers.find", lambda name: name)
    for block in blocks("yaml", page.read_text()):
        (tmp_path / "settings.yaml").write_text(block)
        from_mapping(RunConfig, read_yaml(tmp_path / "settings.yaml"))
