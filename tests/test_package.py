"""The package as users get it: sdist, wheel and editable install, in new environments."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distmp import __version__
from tests.progress import finished

ROOT = Path(__file__).parent.parent


class Distributions(NamedTuple):
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build as `make dist` does: an sdist of the clone, and a wheel of the sdist."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(ROOT))
    (sdist,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    return Distributions(sdist, wheel)


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command that finds no module of this checkout, and return its output."""
    hidden = ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    process = subprocess.Popen(
        command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = finished(process, idle_seconds=60)
    assert process.returncode == 0, out + err
    return out


def new_environment(directory: Path, *requirements: str) -> Path:
    """Install distmp in a new environment; dependencies are those of this one.

    A directory that a .pth file names is searched, but .pth files in it are not: an editable
    install of distmp in this environment is not visible.

    Returns:
        The directory of its commands.
    """
    venv.create(directory, symlinks=True)
    commands = directory / "bin"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(commands / "python"), "install"]
    offline = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    run(*pip, *offline, *requirements)
    return commands


def test_sdist_has_every_tracked_file(built: Distributions) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    tracked, untracked = (
        set(run("git", "ls-files", *option).splitlines())
        for option in ([], ["--others", "--exclude-standard"])
    )
    with tarfile.open(built.sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive if member.isfile()}
    present = {name for name in tracked if (ROOT / name).exists()}
    assert present <= members
    assert members - tracked - untracked == {"PKG-INFO"}


def test_wheel_has_only_package_and_presets(built: Distributions) -> None:
    package = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "distmp").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    presets = {f"distmp/presets/{file.name}" for file in (ROOT / "configs").iterdir()}
    with zipfile.ZipFile(built.wheel) as archive:
        members = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert members == package | presets
    assert {"distmp/py.typed", "distmp/commands/report/report.html"} <= members


def metadata_of(wheel: Path) -> Message:
    return Parser().parsestr(wheel_text(wheel))


def wheel_text(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"distmp-{__version__}.dist-info/METADATA").decode()


def test_package_metadata_is_complete(built: Distributions) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    metadata = metadata_of(built.wheel)
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "distmp developers"
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = str(metadata.get_payload())
    assert "pip install distmp" in description
    assert "](docs/" not in description


@pytest.mark.nightly
def test_wheel_trains_in_empty_directory(built: Distributions, tmp_path: Path) -> None:
    commands = new_environment(tmp_path / "environment", str(built.wheel))
    empty = tmp_path / "empty"
    empty.mkdir()
    distmp = str(commands / "distmp")
    script = "import distmp; distmp.Engine; print(distmp.__file__)"
    found = Path(run(str(commands / "python"), "-c", script, cwd=empty).strip())
    assert found.is_relative_to(tmp_path / "environment")
    *presets, _, _, directory = run(distmp, "presets", cwd=empty).splitlines()
    assert any(line.startswith("preset:quickstart ") for line in presets)
    assert Path(directory) == found.parent / "presets"
    train = ["train", "--config", "preset:quickstart", "--steps", "20"]
    assert "held-out loss" in run(distmp, *train, cwd=empty)
    assert len((empty / "runs/quickstart/steps.jsonl").read_text().splitlines()) == 20
    assert entry_point_of_image() == ["distmp", "launch", "--", *train[1:3]]


def instructions(name: str) -> list[str]:
    """Return the arguments of an instruction of the Dockerfile, wherever it occurs."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def entry_point_of_image() -> list[str]:
    (entry_point,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")
    return [*json.loads(entry_point), *json.loads(command)]


@pytest.mark.nightly
def test_docker_image_commands_install_wheel(built: Distributions, tmp_path: Path) -> None:
    """The wheel is built and installed as in the image; torch and users are the image's own."""
    build, torch, install, user, _ = instructions("RUN")
    assert user.startswith("useradd ")
    assert torch.split()[-1] == "torch"
    assert "ARG TORCH_INDEX=" in (ROOT / "Dockerfile").read_text()
    wheels = tmp_path / "wheels"
    pip = f"{sys.executable} -m pip --disable-pip-version-check"
    command = build.replace("pip", pip, 1).replace("/wheels", str(wheels))
    run("sh", "-c", f"{command} --no-build-isolation")
    assert [wheel.name for wheel in wheels.iterdir()] == [built.wheel.name]
    in_environment = install.replace("pip", f"{pip} --python {sys.executable}", 1)
    printed = run(
        "sh",
        "-c",
        f"{in_environment.replace('/wheels', str(wheels))} --no-deps --no-index --dry-run",
    )
    assert "distmp" in printed


FILES = "https://example.org/distmp/blob/v1"


@pytest.mark.parametrize("files", [None, FILES])
def test_package_index_readme_has_no_relative_links(files: str | None) -> None:
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    readme = (ROOT / "README.md").read_text()
    page = hook["for_index"](readme, files)
    relative = re.findall(r"\]\((?!https?://|#)([^)]+)\)", readme)
    assert "docs/engine.md" in relative
    targets = set(re.findall(r"\]\(([^)]+)\)", page))
    assert targets == set() if files is None else {f"{files}/{path}" for path in relative}
    assert ("The [engine](" if files else "The engine in a") in page


def test_package_urls_follow_the_repository(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DISTMP_SOURCE_URL", "https://example.org/distmp/")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path))
    (wheel,) = tmp_path.iterdir()
    metadata = metadata_of(wheel)
    files = f"https://example.org/distmp/blob/v{__version__}"
    assert dict(url.split(", ") for url in metadata.get_all("Project-URL", [])) == {
        "Source": "https://example.org/distmp",
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": "https://example.org/distmp/issues",
    }
    assert f"]({files}/docs/engine.md)" in str(metadata.get_payload())
    for path in re.findall(rf"{files}/([^\s)#,]+)", wheel_text(wheel)):
        assert (ROOT / path).is_file(), path


@pytest.mark.nightly
def test_editable_install_precedes_directory_of_same_name(tmp_path: Path) -> None:
    """A script beside a clone `distmp` finds the package, not the directory of the clone."""
    commands = new_environment(tmp_path / "environment", "--editable", str(ROOT))
    (tmp_path / "distmp").symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text("import distmp; distmp.Engine; print(distmp.__file__)")
    found = run(str(commands / "python"), str(script), cwd=tmp_path).strip()
    assert found == str(ROOT / "distmp" / "__init__.py")
    assert str(ROOT / "configs") in run(str(commands / "distmp"), "presets", cwd=tmp_path)
