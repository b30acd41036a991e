"""The pages of docs/: their length, the index, and the configuration reference."""

from __future__ import annotations

import dataclasses
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.figures import ROOT, with_figures
from distmp.commands.calibrate.settings import CalibrationConfig
from distmp.config import RunConfig
from distmp.launcher import rendezvous
from distmp.masking import is_secret

PAGES = sorted((ROOT / "docs").glob("*.md"))
MOST_WORDS = 1200


def words(page: str) -> int:
    """Count the words of a page without its code and without generated tables."""
    page = re.sub(r"<!-- (figures|scenarios): .*?<!-- end of \1 -->", "", page, flags=re.DOTALL)
    return len(re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_is_below_length_limit(page: Path) -> None:
    assert words(page.read_text()) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_agree_with_results(page: Path) -> None:
    assert with_figures(page.read_text()) == page.read_text()


def test_indexes_list_every_page_once() -> None:
    indexes = "".join((ROOT / "docs" / name).read_text() for name in ("index.md", "api.md"))
    trees = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", indexes, flags=re.DOTALL)
    listed = "".join(trees).split()
    assert len(listed) == len(set(listed))
    assert {page.stem for page in PAGES} - {"index"} <= set(listed)


def test_every_door_of_the_index_reaches_code_within_one_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text().partition("```{toctree}")[0]
    doors = index.split("\n## ")[1:]
    assert len(doors) == 4
    for door in doors:
        reached = re.findall(r"\]\(([\w-]+\.md)", door)
        pages = [door, *((ROOT / "docs" / name).read_text() for name in reached[:1])]
        assert re.search(r"^```(python|bash)$", "".join(pages), re.MULTILINE), door
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^- \*\*(.*?)\.\*\*", readme, re.MULTILINE)[:4] == [
        door.splitlines()[0] for door in doors
    ]


def sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield the sections of the settings, by their dotted names."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield f"{prefix}{name}", hint
            yield from sections(hint, f"{prefix}{name}.")


def test_configuration_reference_has_every_section() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for name, cls in sections(RunConfig):
        assert f"\n## {name}\n\n```{{eval-rst}}\n.. autoclass:: {cls.__module__}." in page, name


def test_policy_page_commands_are_accepted(cwd: Path) -> None:
    page = (ROOT / "docs" / "calibrate.md").read_text()
    (cwd / "configs").symlink_to(ROOT / "configs")
    found = re.findall(r"^distmp calibrate (.*)$", page, re.MULTILINE)
    assert found
    for options in found:
        CalibrationConfig.load(shlex.split(options))


def test_migration_page_has_block_for_each_way() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    assert len(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)) == 4
    assert page.count("\nBefore:\n") == 3


@pytest.mark.parametrize("page", ["installing", "accelerate", "transformers"])
def test_versions_are_those_that_the_package_requires(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    project = (ROOT / "pyproject.toml").read_text().replace('requires-python = "', '"Python')
    found = re.findall(r"(\w+)(?:\]\(\w+\.md\))? ([\d.]+) or later", text)
    assert found
    for package, version in found:
        assert f'"{package}>={version}"' in project


def test_security_page_names_agree_with_code() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    message = "the state in the rendezvous store is not torchrun's"
    assert message in page
    assert message in Path(rendezvous.__file__).read_text()
    [names] = re.findall(r"names that end with ((?:`\w+`,? ?)+)", page)
    [contained] = re.findall(r"or contain ((?:`\w+`,? ?)+)", page)
    for name in re.findall(r"`(\w+)`", names):
        assert is_secret(f"my_{name}"), name
    for name in re.findall(r"`(\w+)`", contained):
        assert is_secret(f"{name}_of_mine"), name
