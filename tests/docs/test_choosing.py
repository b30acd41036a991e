"""The page for a choice names the versions of constraints.txt; its sources say what it says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.figures import ROOT

PAGE = (ROOT / "docs" / "choosing.md").read_text()
# What the page claims of installed packages, as text of the file that it names.
CLAIMS = {
    (
        "torch",
        "distributed/tensor/_dispatch.py",
    ): "grad_dtensor = cast(list[dtensor.DTensor], args[0])[0]",
    ("torch", "distributed/checkpoint/filesystem.py"): "pickle.load(metadata_file)",
    ("torch", "distributed/fsdp/_fully_shard/_fsdp_api.py"): "reduce_dtype",
    ("torch", "autograd/anomaly_mode.py"): "class detect_anomaly",
    ("torch", "autograd/gradcheck.py"): "def gradcheck",
    ("accelerate", "accelerator.py"): "loss = loss / self.gradient_accumulation_steps",
    ("accelerate", "commands/estimate.py"): "def estimate_command",
    ("accelerate", "utils/imports.py"): "def is_torch_xla_available",
    ("torch", "distributed/_tools/fsdp2_mem_tracker.py"): "class FSDPMemTracker",
}


def test_versions_are_those_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    for name, package in (
        ("torch", "torch"),
        ("accelerate", "accelerate"),
        ("Lightning Fabric", "lightning-fabric"),
    ):
        version = re.search(rf"^{package}==(\S+)$", constraints, re.MULTILINE)
        assert version is not None
        assert f"{name} {version[1]}" in PAGE


def test_every_named_file_of_an_installed_package_is_checked() -> None:
    named = re.findall(r"\b(torch|accelerate) `([\w/]+\.py)`", PAGE)
    assert {*named} == {*CLAIMS}


@pytest.mark.parametrize(("package", "path"), CLAIMS)
def test_source_says_what_page_claims(package: str, path: str) -> None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    text = (Path(spec.origin).parent / path).read_text()
    assert CLAIMS[package, path] in text
