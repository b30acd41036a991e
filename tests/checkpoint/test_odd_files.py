"""Odd and forged files in a checkpoint: one message, and `auto` passes over them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distmp.checkpoint import manifest, store
from distmp.checkpoint.manifest import STATE_FILE
from distmp.checkpoint.storage import INDEX_FILE
from distmp.errors import CheckpointError
from distmp.training.setup import stored_progress
from distmp.utils.files import read_regular


def save(directory: Path, step: int, numbers: dict[str, Any] | None = None) -> Path:
    given = {"step": step, "samples": 8 * step} if numbers is None else numbers
    path = store.save(directory, step, {"weight": torch.ones(4, 3)}, given, keep=9)
    assert isinstance(path, Path)
    return path


def huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "loop": lambda file: file.symlink_to(file.name),
    "huge": huge,
}


@pytest.mark.parametrize("name", [STATE_FILE, INDEX_FILE, "__0_0.distcp"])
@pytest.mark.parametrize("kind", ODD)
def test_a_file_that_is_no_small_regular_file(kind: str, name: str, tmp_path: Path) -> None:
    first, second = (save(tmp_path, step) for step in (1, 2))
    (second / name).unlink()
    ODD[kind](second / name)
    checkpoint, [problem], *_ = store.usable(tmp_path)
    assert str(second / name) in problem
    assert checkpoint is not None
    assert checkpoint.path == first


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"12")
    (tmp_path / "link").symlink_to("small")
    assert read_regular(tmp_path / "link", 2) == b"12"
    with pytest.raises(OSError, match="2 bytes, more than 1"):
        read_regular(tmp_path / "small", 1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        read_regular(tmp_path / "pipe", 2)


def rewrite(path: Path, **values: Any) -> None:
    """Change state.json, and recompute its checksum."""
    content = manifest.read(path)
    assert content.files is not None
    given = {"step": content.step, "numbers": content.numbers} | values
    (path / STATE_FILE).write_bytes(manifest.encode(given["step"], given["numbers"], content.files))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"numbers": {"step": 1, "samples": 8}}, "it holds step 2, but its numbers step 1"),
        ({"step": 3}, "it holds step 3, but its numbers step 2"),
        ({"step": 3, "numbers": {"step": 3}}, "named after step 2, but it holds step 3"),
        ({"step": "2"}, "its step is '2', not a count"),
        ({"step": True}, "its step is 'True', not a count"),
        ({"numbers": [1]}, "its numbers are a list"),
    ],
)
def test_numbers_that_disagree_are_refused(
    values: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    first, second = (save(tmp_path, step) for step in (1, 2))
    rewrite(second, **values)
    found = store.usable(tmp_path)
    assert problem in found.damaged[0]
    assert found.checkpoint is not None
    assert found.checkpoint.path == first


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({}, "they lack the step"),
        ({"step": 1}, "they lack the step or the position in the data"),
        ({"step": 1, "samples": "8"}, "samples is '8', not a count"),
        ({"step": 1, "samples": -8}, "samples is '-8', not a count"),
        ({"step": 1, "samples": 8, "ranks": 3}, "ranks is a int"),
    ],
)
def test_a_run_does_not_continue_without_its_position(
    numbers: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, numbers)
    with pytest.raises(CheckpointError, match=problem):
        stored_progress(store.StoredCheckpoint(path))


def test_files_outside_of_the_directory_are_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = json.loads((path / STATE_FILE).read_text())
    files = {f"../{path.name}/{name}": manifest.FileSum(file["bytes"], int(file["crc32"], 16))
             for name, file in state["files"].items()}  # fmt: skip
    (path / STATE_FILE).write_bytes(manifest.encode(1, state["numbers"], files))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        store.StoredCheckpoint(path).verify()
