from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from benchmarks.gpu import packages

METADATA = "Metadata-Version: 2.1\nName: {0}\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(directory: Path, name: str) -> None:
    """Write a wheel with one module, whose `VALUE` is 7."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 7\n")
        wheel.writestr(f"{info}/METADATA", METADATA.format(name))
        wheel.writestr(f"{info}/WHEEL", WHEEL)
        wheel.writestr(f"{info}/RECORD", "")


def test_needed_packages_are_the_dependencies_and_imports_of_tests() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", project, re.DOTALL | re.MULTILINE)
    assert block is not None
    names = set(re.findall(r'"([\w-]+)', block[1]))
    imported = {"accelerate", "hypothesis", "matplotlib", "pytest"}
    assert names | imported | {"pytest-timeout", "pytest-xdist"} == set(packages.NEEDED)


def test_missing_packages_are_installed_from_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "NEEDED", ("torch", "only_in_wheels"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/nothing")
    assert packages.missing() == ["only_in_wheels"]
    for name in ("torch", "only_in_wheels"):
        make_wheel(tmp_path / "wheels", name)
    target = tmp_path / "target"
    packages.install(tmp_path / "wheels", target)
    assert packages.missing() == []
    assert sys.path[-1] == str(target)
    assert (target / "only_in_wheels.py").exists()
    # Installed packages are not replaced.
    assert not (target / "torch.py").exists()
    packages.install(tmp_path / "wheels", target)


def test_a_directory_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--wheels .*: the directory has no wheel"):
        packages.install(tmp_path, tmp_path / "target")


def test_a_wheel_for_another_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other-1.0-cp27-cp27m-win32.whl").touch()
    with pytest.raises(SystemExit, match="pip could not install the wheels"):
        packages.install(tmp_path, tmp_path / "target")
