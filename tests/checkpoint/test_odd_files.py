"""Odd and forged files in the folder of a checkpoint: one message, and `auto` passes over them."""

from __future__ import annotations

import json
import os
import pickle
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
from tests.checkpoint.sealing import seal


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
    "folder": Path.mkdir,
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


def forge(path: Path, change: Callable[[Any], object]) -> None:
    """Change the index, and recompute the checksums."""
    index = pickle.loads((path / INDEX_FILE).read_bytes())
    change(index)
    (path / INDEX_FILE).write_bytes(pickle.dumps(index))
    seal(path)


def parts(*starts_and_lengths: tuple[int, int]) -> Callable[[Any], None]:
    """Divide the tensor into rows [start, start + length)."""

    def change(index: Any) -> None:
        tensor = index.state_dict_metadata["weight"]
        kind = type(tensor.chunks[0])
        tensor.chunks = [
            kind(torch.Size([start, 0]), torch.Size([length, 3]))
            for start, length in starts_and_lengths
        ]
        [(key, entry)] = index.storage_data.items()
        index.storage_data = {
            type(key)("weight", chunk.offsets): type(entry)(entry.relative_path, 400 * n, 400)
            for n, chunk in enumerate(tensor.chunks)
        }

    return change


def entry(**values: Any) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        [stored] = index.storage_data.values()
        for name, value in values.items():
            setattr(stored, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (parts((0, 2), (0, 2)), "has parts that overlap"),
        (parts((0, 3), (2, 1)), "has parts that overlap"),
        (parts((0, 2), (3, 2)), r"has a part outside of its shape \[4, 3\]"),
        (parts((-2, 4)), "has a part outside of its shape"),
        (parts((0, 3)), "is stored incompletely"),
        (entry(length=40), "is stored in fewer bytes than it has"),
        (entry(offset=-1), "reads the same bytes"),
        (entry(transform_descriptors=["zstd"]), "is stored incompletely, or compressed"),
        (lambda index: index.storage_data.clear(), "is stored incompletely, or compressed"),
    ],
)
def test_a_forged_index_is_refused(
    change: Callable[[Any], None], problem: str, tmp_path: Path
) -> None:
    first, second = (save(tmp_path, step) for step in (1, 2))
    forge(second, change)
    with pytest.raises(CheckpointError, match=problem):
        store.load(second, {"weight": torch.zeros(4, 3)})
    found = store.usable(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.path == first


def test_parts_in_any_order_are_accepted(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    forge(path, parts((2, 1), (0, 2), (3, 1)))
    assert store.StoredCheckpoint(path).index is not None


def rewrite(path: Path, **values: Any) -> None:
    """Change state.json, and recompute its checksum."""
    content = manifest.read(path)
    assert content.files is not None
    given = {"step": content.step, "numbers": content.numbers} | values
    (path / STATE_FILE).write_bytes(manifest.encode(given["step"], given["numbers"], content.files))


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"numbers": {"step": 1, "samples": 8}}, "it holds step 2, but its numbers step 1"),
        ({"step": 3}, "it holds step 3, but its numbers step 2"),
        ({"step": 3, "numbers": {"step": 3}}, "named after step 2, but it holds step 3"),
        ({"step": "2"}, "its step is '2', not a count"),
        ({"step": True}, "its step is 'True', not a count"),
        ({"numbers": [1]}, "its numbers are a list"),
        ({"numbers": {"step": 2, "configuration": nested(60)}}, "nested more than 50 levels"),
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
    ],
)
def test_a_run_does_not_continue_without_its_position(
    numbers: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, numbers)
    with pytest.raises(CheckpointError, match=problem):
        stored_progress(store.StoredCheckpoint(path))


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = json.loads((path / STATE_FILE).read_text())
    files = {f"../{path.name}/{name}": manifest.FileSum(file["bytes"], int(file["crc32"], 16))
             for name, file in state["files"].items()}  # fmt: skip
    (path / STATE_FILE).write_bytes(manifest.encode(1, state["numbers"], files))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        store.StoredCheckpoint(path).verify()
