"""Packages whose public names are imported at their first use."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.torchrun import environment

PACKAGES = (
    "distmp",
    *(f"distmp.{name}" for name in ("engine", "optim", "parallel", "scaling", "telemetry")),
)
WITHOUT_TORCH = (
    ["--help"],
    ["--version"],
    ["presets"],
    ["train", "--help"],
    ["train", "--config", "preset:quickstart", "--help"],
    ["train", "--config", "preset:huggingface", "--help"],
    ["train", "--config", "preset:quickstrat"],
    ["train", "--nope", "3"],
    ["train", "--checkpoint.evry", "5"],
    ["train", "--optim.lr", "abc"],
    ["train", "--config", "preset:fp16-cpu", "--steps", "2"],
    ["launch", "--help"],
    ["launch", "--", "--help"],
    ["launch", "--prot", "1", "--environment", "nowhere"],
    ["launch", "--", "--nope", "3"],
    ["launch", "--dry-run", "--", "--steps", "0"],
    ["launch", "--render", "slurm", "--", "--optim.lr", "abc"],
    ["launch", "--hosts", "a,b", "--", "--checkpoint.evry", "5"],
    ["explain", "--help"],
    ["doctor", "--help"],
    ["calibrate", "--help"],
    ["bench", "precision", "--help"],
    ["data", "tokenize", "--help"],
)
PROGRAM = """
import contextlib, io, json, sys
from distmp import cli
found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["distmp", *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = cli.main()
        except SystemExit as stop:
            code = stop.code
    heavy = [name for name in ("torch", "matplotlib", "transformers") if name in sys.modules]
    found.append([code or 0, len(output.getvalue()), heavy])
print(json.dumps(found))
"""


def test_the_help_and_wrong_settings_do_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(WITHOUT_TORCH)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for arguments, (code, printed, imported) in zip(
        WITHOUT_TORCH, json.loads(done.stdout), strict=True
    ):
        right = arguments[-1] in ("--help", "--version", "presets")
        assert code == (0 if right else 2), arguments
        assert printed > 0, arguments
        assert imported == [], arguments


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
