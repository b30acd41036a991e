"""Documents of all formats, divided into pieces."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.commands.tokenize.sources import (
    InputError,
    Piece,
    digest,
    documents,
    find_pieces,
    group,
)
from distmp.errors import ConfigError

TEXTS = [f"document {i} " + "ä€" * (i % 5) for i in range(40)]


def read(pieces: list[Piece], key: str = "text") -> list[str]:
    return [text for piece in pieces for text in documents(piece, key)]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=15),
    st.integers(1, 200),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.booleans(),
)
def test_pieces_of_jsonl_hold_each_line_once(
    texts: list[str], piece_bytes: int, newline: str, ends: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        lines = newline.join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
        path.write_bytes((lines + newline * ends).encode())
        pieces = find_pieces([folder], "auto", piece_bytes)
        assert read(pieces) == texts
        assert sum(piece.size for piece in pieces) == path.stat().st_size
        assert all(piece.size <= piece_bytes for piece in pieces)


def test_files_of_a_folder_are_sorted_and_hidden_ones_skipped(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.txt", ".hidden/x.txt", "a/.h", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else f"{name}\r\nä")
    pieces = find_pieces([str(tmp_path), str(tmp_path / "b.txt")], "auto", 100)
    assert read(pieces) == [f"{name}\r\nä" for name in ("a/y.txt", "a/z.md", "b.txt", "b.txt")]


def test_groups_are_consecutive_and_large_enough() -> None:
    pieces = [Piece("text", str(i), 0, size, size) for i, size in enumerate([3, 9, 20, 1, 1, 7, 2])]
    groups = group(pieces, 10)
    assert [piece for part in groups for piece in part] == pieces
    assert [[piece.size for piece in part] for part in groups] == [[3, 9], [20], [1, 1, 7, 2]]


def test_the_digest_notices_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    pieces = find_pieces([str(path)], "auto", 10)
    before = digest(pieces)
    assert digest(pieces) == before
    os.utime(path, (1, 1))  # perhaps another content of the same size
    touched = digest(pieces)
    assert touched != before
    path.write_text("two!")
    assert digest(pieces) not in (before, touched)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": 5}\n',
            "at byte 14 has a value of type int for 'text'",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}', "line at byte 14 has no key 'text'; set --ke"),
        ("a.jsonl", b'{"text": "x"}\n{"te', "the line at byte 14 is not JSON"),
        ("a.jsonl", b'["x"]', "the line at byte 0 is not an object with a key 'text'"),
        ("a.jsonl", b'{"text": "x\\ud800"}', "has an unpaired surrogate"),
        ("a.txt", b"abc\xff", "byte 3 is not UTF-8; convert the file"),
    ],
)
def test_a_document_that_cannot_be_read_is_named(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}: .*{message}"):
        read(find_pieces([str(tmp_path)], "auto", 1000))


def test_inputs_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        find_pieces([str(tmp_path / "none")], "auto", 10)
    with pytest.raises(ConfigError, match="there is no file in this folder"):
        find_pieces([str(tmp_path)], "auto", 10)
    (tmp_path / "a.json").write_text('{"text": "x"}')
    with pytest.raises(ConfigError, match="set --format to text or jsonl"):
        find_pieces([str(tmp_path)], "auto", 10)
    assert read(find_pieces([str(tmp_path)], "jsonl", 10)) == ["x"]


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    for name in ("a.txt", "closed/b.txt"):
        (tmp_path / name).write_text(name)
    scandir = os.scandir

    def listed(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    with pytest.raises(ConfigError, match=r"INPUT = .*cannot list .*closed: Permission denied"):
        find_pieces([str(tmp_path)], "auto", 10)


@pytest.mark.parametrize(
    ("module", "name"), [("pyarrow.parquet", "a.parquet"), ("datasets", "state.json")]
)
def test_without_its_library_a_format_is_one_message(
    module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="install it with `pip install datasets`") as caught:
        find_pieces([str(tmp_path)], "auto", 10)
    assert str(caught.value).count("INPUT") == 1


def test_parquet_files_are_read_by_row_group(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": list(range(40)), "text": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=15)
    pieces = find_pieces([str(tmp_path)], "auto", 10)
    assert [piece.first for piece in pieces] == [0, 1, 2]
    assert read(pieces) == TEXTS
    assert read(pieces[1:2]) == TEXTS[15:30]
    with pytest.raises(InputError, match="no column 'body'; set --key to one of id, text"):
        read(pieces, "body")
    with pytest.raises(InputError, match="group 0 has a value of type int for 'id'; use a string"):
        read(pieces, "id")
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match="is not a parquet file"):
        find_pieces([str(tmp_path)], "auto", 10)


def test_saved_data_sets_are_read_by_row(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"id": list(range(40)), "body": TEXTS})
    datasets.DatasetDict({"train": data, "test": data.select([3, 1])}).save_to_disk(tmp_path)
    with pytest.raises(ConfigError, match=r"has several splits; name one of .*test, .*train"):
        find_pieces([str(tmp_path)], "auto", 10)
    pieces = find_pieces([str(tmp_path / "train")], "auto", 500)
    assert len(pieces) > 2
    assert read(pieces, "body") == TEXTS
    assert read(find_pieces([str(tmp_path / "test")], "auto", 500), "body") == [TEXTS[3], TEXTS[1]]
    with pytest.raises(InputError, match="has no column 'text'; set --key to one of id, body"):
        read(pieces)
