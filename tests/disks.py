"""Disks that are full or read-only. Tests are skipped without the privilege to mount."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def disk(directory: Path, options: str) -> Iterator[Path]:
    """Mount a disk in memory on `directory`.

    Args:
        directory: Created if missing; its contents are hidden while the disk is mounted.
        options: Mount options, such as "size=2m" or "ro".
    """
    directory.mkdir(parents=True, exist_ok=True)
    mount(directory, options)
    try:
        yield directory
    finally:
        unmount(directory)


def mount(directory: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no command `mount`")
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")


def unmount(directory: Path) -> None:
    # Lazily: files on it may still be open.
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Fill the disk; return the file that takes the space."""
    ballast = directory / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return ballast
