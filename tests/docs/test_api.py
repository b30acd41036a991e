"""Every class and function of the API reference has an example, and every example runs."""

from __future__ import annotations

import doctest
import inspect
import io
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distmp
from benchmarks.figures import ROOT
from distmp.distributed.world import leave

DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)((?:\n   :.*)*)", re.MULTILINE)
# Shown in the example of `Callback` or `StepDecision`, whose methods or fields use them.
BESIDE_OTHERS = {
    "distmp.training.callbacks.Callback": ("TrainingLoop", "StepResult", "PendingStep", "Rollback"),
    "distmp.scaling.step_decision.StepDecision": (
        *("local_stats", "all_reduce_stats", "decide_step"),
    ),
}


def documented() -> Iterator[str]:
    """Yield the import path of each class and function, and of each module with all members."""
    text = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("api-*.md")))
    for kind, path, options in DIRECTIVE.findall(text):
        members = re.search(r":members: (.+)", options)
        if kind == "module" and members:
            yield from (f"{path}.{name}" for name in members[1].split(", "))
        else:
            yield path


PATHS = [*documented()]


def examples(path: str) -> doctest.DocTest:
    """Return the example of an object; a missing extra skips the test."""
    if path.startswith("distmp.integrations."):
        pytest.importorskip(path.split(".")[2])
    documented_object = pkgutil.resolve_name(path)
    module = inspect.getmodule(documented_object)
    assert module is not None
    finder = doctest.DocTestFinder(recurse=False)
    (found,) = finder.find(documented_object, path, module, extraglobs={"torch": torch})
    return found


@pytest.mark.parametrize("path", PATHS)
def test_documented_object_has_example_that_runs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, names in BESIDE_OTHERS.items():
        if path.rpartition(".")[2] in names and path.rpartition(".")[0] == owner.rpartition(".")[0]:
            assert path.rpartition(".")[2] in "".join(e.source for e in examples(owner).examples)
            return
    (tmp_path / "distmp").symlink_to(ROOT / "distmp")  # data of the example that trains
    monkeypatch.chdir(tmp_path)
    # Lightning sets it when it is imported.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    found = examples(path)
    assert found.examples
    output = io.StringIO()
    failed, _ = doctest.DocTestRunner().run(found, out=output.write)
    leave()  # forgets the arguments of `distmp.init`
    assert not failed, output.getvalue()


def test_api_reference_has_every_public_name() -> None:
    modules = {path.rpartition(".")[2] for path in PATHS}
    assert {*distmp.__all__} <= modules
    assert len(PATHS) == len({*PATHS})


def test_api_reference_has_every_import_path_of_the_pages() -> None:
    """What pages tell users to import is public, and so it is in the reference."""
    imported = set()
    for page in (ROOT / "docs").glob("*.md"):
        for module, names in re.findall(
            r"^ *(?:>>> )?from (distmp(?:\.\w+)*) import (.+)$", page.read_text(), re.MULTILINE
        ):
            names = names.partition("#")[0]
            imported |= {(module, name.strip()) for name in names.split(",")}
    assert imported
    for module, name in sorted(imported):
        listed = [path for path in PATHS if f"{path}.".startswith(f"{module}.{name}.")]
        assert listed or module in PATHS, f"{module}.{name}"
