"""The pictures of the pages show the data beside them, and that data is what the code predicts."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import ROOT
from distmp.cli import main

PICTURES = ROOT / "docs" / "pictures"
PAGES = {page.name: page.read_text() for page in (ROOT / "docs").glob("*.md")}
SHOWN = {
    path: alt
    for page in PAGES.values()
    for alt, path in re.findall(r"!\[([^\]]*)\]\(pictures/(.*?)\)", page)
}
MEMORY = json.loads((PICTURES / "memory.json").read_text())
RANGES = json.loads((PICTURES / "timeline.json").read_text())["ranges"]


def texts(path: Path) -> list[str]:
    return re.findall(r"<text [^>]*>(.*?)</text>", path.read_text(), re.DOTALL)


def test_pictures_are_drawn_from_their_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw: Any = runpy.run_path(str(PICTURES / "draw.py"))
    draw["main"](tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in PICTURES.glob("*.svg"))
    for name in drawn:
        assert texts(tmp_path / name) == texts(PICTURES / name), f"run {PICTURES / 'draw.py'}"


def test_every_picture_is_shown_with_a_description() -> None:
    assert {*SHOWN} == {path.name for path in PICTURES.glob("*.svg")}
    assert all(len(alt.split()) > 10 for alt in SHOWN.values())


def test_numbers_of_description_are_those_of_the_picture() -> None:
    sizes = [sum(each["memory"].values()) for each in MEMORY["strategies"].values()]
    assert re.findall(r"([\d.]+) GB", SHOWN["memory.svg"]) == [
        f"{size / 1e9:.1f}" for size in sizes
    ]


def test_recorded_step_reduces_during_the_last_backward() -> None:
    for rank in (0, 1):
        ranges = [(name, start, length) for each, name, start, length in RANGES if each == rank]
        [(begin, length)] = [(start, n) for name, start, n in ranges if name[:8] == "backward"][-1:]
        reductions = [start for name, start, _ in ranges if name == "all-reduce"]
        assert all(begin < start for start in reductions)
        assert sum(start < begin + length for start in reductions) > len(reductions) / 2
        assert [name for name, *_ in ranges if name in ("decision", "update")] == [
            *("decision", "update")
        ]


@pytest.mark.nightly
@pytest.mark.parametrize("name", MEMORY["strategies"])
def test_memory_is_what_explain_predicts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    strategy = MEMORY["strategies"][name]
    options = shlex.split(f"{MEMORY['arguments']} {strategy['options']} --json")
    assert main(["explain", *options]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory == pytest.approx(strategy["memory"], rel=1e-3, abs=1024)
