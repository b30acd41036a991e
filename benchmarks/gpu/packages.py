"""Packages that the jobs need, from wheels if this machine has no network."""

from __future__ import annotations

import subprocess
import sys
from importlib import invalidate_caches, metadata
from pathlib import Path

# The dependencies of distmp, and what its tests import.
NEEDED = (
    "torch",
    "accelerate",
    "matplotlib",
    "numpy",
    "psutil",
    "pyyaml",
    "safetensors",
    "tyro",
    "hypothesis",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
)
ROOT = Path(__file__).parents[2]
TARGET = ROOT / "build" / "gpu-packages"


def missing() -> list[str]:
    """Return the needed packages that are not installed."""
    return [name for name in NEEDED if not _is_installed(name)]


def install(wheels: Path, target: Path = TARGET) -> None:
    """Install the packages of a directory of wheels that are not installed yet; needs no network.

    Args:
        wheels: Directory with the wheels of packages and of their dependencies.
        target: Directory for the installed packages, which is added to the end of `sys.path`.

    Raises:
        SystemExit: If the directory has no wheel, or pip could not install one.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"--wheels {wheels}: the directory has no wheel (docs/gpu.md)")
    new = [wheel for wheel in found if not _is_installed(wheel.name.partition("-")[0])]
    if new:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-index", "--no-deps", "--upgrade", "--target", str(target)]
        if subprocess.run([*command, *map(str, new)]).returncode:
            raise SystemExit(f"--wheels {wheels}: pip could not install the wheels; see above")
    # At the end, so that installed packages take precedence.
    sys.path.append(str(target))
    invalidate_caches()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
