"""Paths, names and numbers on the pages about code and security are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import distmp
from benchmarks.figures import ROOT
from distmp.cli import _SUBCOMMANDS
from distmp.config import RunConfig
from distmp.launcher import plan
from distmp.utils.files import PRIVATE
from distmp.utils.settings import setting_annotations

PACKAGE = Path(distmp.__file__).parent
SOURCES = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("architecture", "security")}
# Names of torch, of Linux, and of other programs, which the code need not contain.
OTHERS = {
    *("broadcast_object_list", "weights_only", "--master-addr", "WANDB_API_KEY"),
    *("/proc/sys/net/ipv4/ip_local_port_range", "chmod -R g+rX DIRECTORY", "ps"),
    *("[tool.importlinter]", "make lint", "# Note [...]"),
}
NUMBERS = {
    "security": {
        "20000": plan._PORTS[0],
        "29999": plan._PORTS[-1],
        "29400": plan._DEFAULT_PORT,
        "0600": int(f"{PRIVATE:o}"),
    },
    "architecture": {},
}


def spans(page: str) -> Iterator[tuple[str, list[Path]]]:
    """Yield what is in backticks, with the files and directories before it on the same line."""
    for line in re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL).splitlines():
        found = re.findall(r"`([^`]+)`", line)
        paths: list[Path] = []
        for span in found:
            yield span, [*paths]
            paths += filter(None, [_path(span)])


def _path(span: str) -> Path | None:
    file = span.partition("::")[0]
    if not re.fullmatch(r"[\w./]*[\w]\.(py|toml)|[\w/]+/", file):
        return None
    return PACKAGE / file if (PACKAGE / file).exists() else ROOT / file


def _contain(paths: list[Path], name: str) -> bool:
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.IGNORECASE)
    texts = (text for file, text in SOURCES.items() if {file, *file.parents} & {*paths})
    return any(word.search(text) for text in texts)


@pytest.mark.parametrize(
    ("page", "span", "paths"), [(page, *found) for page in PAGES for found in spans(page)]
)
def test_named_paths_and_objects_exist(page: str, span: str, paths: list[Path]) -> None:
    if path := _path(span):
        assert path.exists()
    elif span not in OTHERS and span not in setting_annotations(RunConfig):
        command, *words = span.split()
        if command == "distmp":
            assert words[0] in _SUBCOMMANDS
            paths = []
        # A name after files is in one of these.
        for word in words if command == "distmp" else [command, *words]:
            assert _contain(paths or [PACKAGE], word.rpartition(".")[2]), word


@pytest.mark.parametrize("page", PAGES)
def test_numbers_agree_with_code(page: str) -> None:
    found = re.findall(r"(?<![\w.])\d{3,}(?![\w.]*\w)", PAGES[page])
    assert {number: int(number) for number in found} == NUMBERS[page]


def test_diagram_commands_exist() -> None:
    diagram = PAGES["architecture"].partition("```text")[2]
    [listed] = re.findall(r"commands +integrations +([\w,\s]+) \|", diagram)
    modules = [module for module, _ in _SUBCOMMANDS.values()]
    assert {*re.split(r",\s+", listed)} == {
        module.split(".")[2] for module in modules if module.startswith("distmp.commands.")
    }


def test_private_fsdp_attributes_are_used_in_one_file() -> None:
    private = re.compile(r"torch\.distributed\.fsdp\._|_fsdp_param_group|_get_fsdp_state")
    owners = {path.name for path, text in SOURCES.items() if private.search(text)}
    assert owners == {"fsdp_internals.py"}
