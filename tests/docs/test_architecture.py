"""The architecture page: its layers are those of the linter, and its paths those of the code."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import distmp
from tests.ranks import in_turn, ranks
from tests.torchrun import tiny

ROOT = Path(__file__).parents[2]
PACKAGE = Path(distmp.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()

# The lists of paths, as "file::qualified name". An entry of the first one has the function under
# `ddp`, and after it that under `fsdp`, if it is another one.
_LISTS = [
    [re.findall("`([^`]*::.*?)`", entry) for entry in re.findall(r"^\d+\. .*$", part, re.M)]
    for part in PAGE.split("\n## ")[1:]
]
GRADIENT = {"ddp": [names[0] for names in _LISTS[0]], "fsdp": [names[-1] for names in _LISTS[0]]}
GRADIENTS = [*GRADIENT["ddp"], *GRADIENT["fsdp"]]
SETTING, CHECKPOINT = ([name for names in part for name in names] for part in _LISTS[1:])


def functions(file: str) -> dict[int, str]:
    """Return the qualified names of a file's functions by their first line."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if isinstance(child, ast.FunctionDef):
                    first = min([child, *child.decorator_list], key=lambda part: part.lineno)
                    found[first.lineno] = name
                visit(child, f"{name}.")

    visit(ast.parse((PACKAGE / file).read_text()), "")
    return found


@contextmanager
def called(wanted: list[str]) -> Iterator[list[str]]:
    """Note in which order functions are first called, in any thread."""
    import threading

    lines = {
        (str(PACKAGE / file), line): f"{file}::{name}"
        for file in {step.partition("::")[0] for step in wanted}
        for line, name in functions(file).items()
    }
    order: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code: CodeType = frame.f_code
            name = lines.get((code.co_filename, code.co_firstlineno))
            if name in wanted and name not in order:
                order.append(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield order
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", sorted({*GRADIENTS, *SETTING, *CHECKPOINT}))
def test_functions_of_call_paths_exist(step: str) -> None:
    file, _, name = step.partition("::")
    assert name in functions(file).values()


def test_call_paths_are_read_from_page() -> None:
    assert [len(GRADIENT["ddp"]), len(SETTING), len(CHECKPOINT)] == [15, 10, 15]
    assert len({*GRADIENT["fsdp"]} - {*GRADIENT["ddp"]}) == 5


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_gradient_path_agrees_with_code(strategy: str) -> None:
    from tests.reference import make_engine, microbatches

    engine = make_engine(policy="bf16", strategy=strategy)
    batches = microbatches(0, ((3, 5), (1, 7)), engine.world.rank)
    engine.step(batches)  # the first step does more than others
    with called(GRADIENT[strategy]) as order:
        engine.step(batches)
    assert order == GRADIENT[strategy]


def test_checkpoint_path_agrees_with_code(tmp_path: Path) -> None:
    from tests.reference import make_engine, microbatches

    engine = make_engine(policy="bf16")
    engine.step(microbatches(0, ((3, 5),), 0))
    with called(CHECKPOINT) as order:
        engine.save(tmp_path, wait=False)
        engine.wait_for_save()
        engine.load(tmp_path)
    assert order == CHECKPOINT


@pytest.mark.nightly
def test_setting_path_agrees_with_code(cwd: Path) -> None:
    from distmp.train import main

    (cwd / "x.yaml").write_text("optim:\n  max_norm: 0.5\n")
    arguments = ["--config=x.yaml", *tiny(cwd, "--checkpoint.every=1", "--steps=2")]
    with called(SETTING) as order:
        assert main([*arguments, "--log.console=plain"]) == 0
    assert order == SETTING


def test_layers_agree_with_linter() -> None:
    contracts = _toml()["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    known = {name for layer in layers for name in re.findall(r"\w+", layer)} - {"_lazy"}
    [diagram] = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    shown = [re.findall(r"\w+", line[7:35]) for line in diagram.splitlines()]
    assert {name for line in shown for name in line} == known
    order = [set(re.findall(r"\w+", layer)) - {"_lazy"} for layer in layers]
    ranks_of = {name: index for index, layer in enumerate(order) for name in layer}
    heights = [ranks_of[name] for line in shown for name in line]
    assert heights == sorted(heights)
    for letter, path in (("G", GRADIENTS), ("K", SETTING), ("C", CHECKPOINT)):
        marked = {i for i, line in enumerate(diagram.splitlines()) if letter in line[:5]}
        packages = {re.split(r"\W", step)[0] for step in path}
        assert marked == {i for i, names in enumerate(shown) if packages & {*names}}, letter


def test_files_of_contributing_table_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("## Where code goes")[2].partition("## Tests")[0]
    for place in re.findall(r"`([\w/]+(?:\.py|/))`", table):
        assert (PACKAGE / place).exists() or (ROOT / place).exists(), place


def _toml() -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # before Python 3.11
        pytest.skip("needs a reader of TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
