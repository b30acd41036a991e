from __future__ import annotations

import os
from collections.abc import Callable
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


def test_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("a.txt")
    for content in (b"new", b"newer"):
        with replacing(link) as file:
            file.write(content)
        assert link.is_symlink()
        assert (tmp_path / "a.txt").read_bytes() == content


@pytest.mark.parametrize("create", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_only_regular_files_are_replaced(create: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "a"
    create(path)
    before = path.lstat()
    with pytest.raises(OSError, match="Not a regular file"), replacing(path):
        pass
    assert path.lstat() == before
    assert list(tmp_path.iterdir()) == [path]


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
