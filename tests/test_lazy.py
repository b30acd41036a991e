"""Packages whose public names are imported at their first use."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

import distmp
from distmp.cli import _SUBCOMMANDS
from tests.torchrun import environment, python

PACKAGES = ("distmp", *(f"distmp.{name}" for name in ("optim", "parallel")))
WITHOUT_TORCH = (
    *([name, "--help"] for name in _SUBCOMMANDS),
    ["--help"],
    ["--version"],
    ["presets"],
    ["train", "--config", "preset:quickstart", "--help"],
    ["train", "--config", "preset:huggingface", "--help"],
    ["train", "--config", "preset:quickstrat"],
    ["train", "--nope", "3"],
    ["train", "--checkpoint.evry", "5"],
    ["train", "--optim.lr", "abc"],
    ["train", "--config", "preset:fp16-cpu", "--steps", "2"],
    ["launch", "--", "--help"],
    ["launch", "--prot", "1", "--environment", "nowhere"],
    ["launch", "--", "--nope", "3"],
    ["launch", "--dry-run", "--", "--steps", "0"],
    ["launch", "--hosts", "a,b", "--", "--checkpoint.evry", "5"],
    ["calibrate", "--help"],
    ["data", "tokenize", "--help"],
)
PROGRAM = """
import contextlib, io, json, sys
from distmp import cli
found, known = [], set()
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["distmp", *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = cli.main()
        except SystemExit as stop:
            code = stop.code
    imported = {"torch", "matplotlib", "transformers"} & sys.modules.keys()
    found.append([code or 0, len(output.getvalue()), sorted(imported - known)])
    known |= imported
print(json.dumps(found))
"""


@functools.cache
def _found() -> list[tuple[int, int, list[str]]]:
    """Return of each command its exit code, the length of its output and what it imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(WITHOUT_TORCH)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, int, list[str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("arguments", WITHOUT_TORCH, ids=" ".join)
def test_help_and_invalid_settings_do_not_import_torch(arguments: list[str]) -> None:
    if "preset:huggingface" in arguments and find_spec("transformers") is None:
        pytest.skip("needs transformers")
    code, printed, imported = _found()[WITHOUT_TORCH.index(arguments)]
    assert code == (0 if arguments[-1] in ("--help", "--version", "presets") else 2)
    assert printed > 0
    assert imported == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
        # A module of this name would replace the public name as soon as it is imported.
        assert find_spec(f"{package}.{name}") is None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {package} import nothing")


HEAVY = (
    "accelerate",
    "matplotlib",
    "rich",
    "torch",
    "tyro",
)


def test_public_names_exist() -> None:
    assert sorted(distmp.__all__) == distmp.__all__
    assert all(hasattr(distmp, name) for name in distmp.__all__)
    assert (
        sorted(name for names in distmp._PUBLIC_NAMES.values() for name in names) == distmp.__all__
    )
    with pytest.raises(AttributeError, match="module 'distmp' has no attribute 'engines'"):
        _ = distmp.engines


def test_heavy_modules_are_imported_on_first_use() -> None:
    program = (
        f"import sys, distmp; print([name for name in {HEAVY!r} if name in sys.modules],"
        "distmp.parallel.ParallelConfig.__name__, distmp.policy('fp32').name)"
    )
    done = subprocess.run(python("-c", program), env=environment(), capture_output=True, text=True)
    assert done.stdout == "[] ParallelConfig fp32\n", done.stderr
