from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmp.checkpoint import manifest, saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.manifest import STATE_FILE, FileSum
from distmp.errors import CheckpointError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=10,
)


@settings(deadline=None)
@given(
    step=st.integers(0, 2**62 - 1),
    numbers=st.dictionaries(st.text().filter(lambda name: name != "step"), JSON, max_size=4),
)
def test_round_trip(step: int, numbers: Any) -> None:
    files = {"data": FileSum(7, 2**32 - 1), "other": FileSum()}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / STATE_FILE).write_bytes(manifest.encode(step, numbers, files))
        found = manifest.read(path)
    assert (found.step, found.numbers, found.files) == (step, numbers, files)


def test_keys_become_text_in_json(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(manifest.encode(1, {"a": {1: 2, None: (3,)}}, {}))
    assert manifest.read(tmp_path).numbers == {"a": {"1": 2, "null": [3]}}


def test_manifest_lists_size_and_checksum_of_files(tmp_path: Path) -> None:
    tensors = {str(size): torch.randn(size) for size in (0, 3, 5000)}
    path = saving.save(tmp_path, 1, tensors, {}, keep=1)
    expected = {
        file.name: FileSum(file.stat().st_size, zlib.crc32(file.read_bytes()))
        for file in path.iterdir()
        if file.name != STATE_FILE
    }
    assert manifest.read(path).files == expected
    assert expected.keys() == {".metadata", "__0_0.distcp"}


def test_files_are_complete_when_they_are_synchronized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {}
    synchronize = os.fsync

    def recording(descriptor: int) -> None:
        status = os.fstat(descriptor)
        sizes[status.st_ino] = status.st_size
        synchronize(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    path = saving.save(tmp_path, 1, {"a": torch.randn(100)}, {}, keep=1)
    for file in path.iterdir():
        assert sizes[file.stat().st_ino] == file.stat().st_size, file.name


def test_checksums_need_no_second_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_file = Path.open

    def recording(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
        opened.append((path.name, mode))
        return open_file(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", recording)
    saving.save(tmp_path, 1, {"weight": torch.zeros(10)}, {}, keep=1)
    assert ("__0_0.distcp", "wb") in opened
    # Retention reads the marks of all checkpoints.
    assert {mode for name, mode in opened if name != STATE_FILE} == {"wb"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is empty or truncated"),
        ("{", "is empty or truncated"),
        ("[]", "cannot be read: TypeError"),
        ("{}", "cannot be read: KeyError"),
        ('{"format": 1}', "cannot be read: KeyError"),
        ('{"format": 2, "numbers": {}}', "has format 2; this version of distmp reads format 1"),
        ('{"format": 1, "crc32": "00000000"}', "its content does not match its checksum"),
        ("[" * 100_000, "cannot be read: RecursionError"),
        (b"\xff" * 10_000, "is empty or truncated"),
    ],
)
def test_unreadable_manifest_is_refused(tmp_path: Path, content: str | bytes, problem: str) -> None:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / STATE_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=problem) as error:
        manifest.read(tmp_path)
    assert str(tmp_path / STATE_FILE) in str(error.value)
    assert len(str(error.value)) < 500


def test_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        manifest.read(tmp_path)


def test_checksum_covers_numbers(tmp_path: Path) -> None:
    path = saving.save(tmp_path, 1, {}, {"samples": 8}, keep=1)
    assert isinstance(path, Path)
    text = (path / STATE_FILE).read_text()
    (path / STATE_FILE).write_text(text.replace('"samples": 8', '"samples": 9'))
    with pytest.raises(CheckpointError, match="its content does not match its checksum"):
        _ = StoredCheckpoint(path).state.numbers
