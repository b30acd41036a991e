from __future__ import annotations

from pathlib import Path

import pytest

from distmp.utils.files import replacing


def test_write_replaces_content_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_open_readers_keep_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        with replacing(path) as file:
            file.write(b"new")
        assert reader.read() == b"old"


def test_write_error_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")

    def replace_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        replace_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
