"""Finds documents in files and datasets, and divides them into pieces of similar size.

The pieces depend only on the input and the requested size, not on how many processes read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distmp.data.errors import DataError
from distmp.errors import ConfigError
from distmp.utils.visible_files import visible_files

FORMATS = ("auto", "text", "jsonl", "parquet")

_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# Written by `Dataset.save_to_disk` and `DatasetDict.save_to_disk`.
_DATASET_FILE, _SPLITS_FILE = "state.json", "dataset_dict.json"
_ROWS = 256


class InputError(DataError):
    """A document that cannot be read."""

    exit_code = 2


class Piece(NamedTuple):
    """Documents of one file or dataset.

    Attributes:
        format: "text", "jsonl", "parquet" or "dataset".
        path: The file, or the folder of the dataset.
        first: First byte, row group or row, depending on the format.
        last: First byte, row group or row after the piece.
        size: Approximate size in bytes.
    """

    format: str
    path: str
    first: int
    last: int
    size: int


def find_pieces(inputs: Sequence[str], format_: str, piece_bytes: int) -> list[Piece]:
    """Return the pieces of all inputs, in order; files of a folder are sorted by relative path.

    Args:
        inputs: Files, folders of files, or folders of `Dataset.save_to_disk`.
        format_: One of `FORMATS`; "auto" decides by the suffix of each file.
        piece_bytes: Size of a piece of a file or dataset that can be divided.

    Raises:
        ConfigError: If an input does not exist, has no files, or cannot be read.
    """
    pieces: list[Piece] = []
    for name in inputs:
        path = Path(name).expanduser()
        if (path / _SPLITS_FILE).is_file():
            folders = ", ".join(
                str(file.parent) for file in sorted(path.glob(f"*/{_DATASET_FILE}"))
            )
            raise ConfigError("INPUT", name, f"has several splits; name one of {folders}")
        if (path / _DATASET_FILE).is_file():
            pieces += _divide_dataset(path, piece_bytes)
            continue
        for file in _files(name, path):
            pieces += _divide_file(file, _format_of(file, format_), piece_bytes)
    return pieces


def group(pieces: Sequence[Piece], part_bytes: int) -> list[list[Piece]]:
    """Group consecutive pieces, so that each group but the last has `part_bytes` or more."""
    groups: list[list[Piece]] = []
    size = part_bytes
    for piece in pieces:
        if size >= part_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.size
    return groups


def digest(pieces: Sequence[Piece]) -> str:
    """Return a hash of the pieces, and of sizes and times of their files; content is not read."""
    result = hashlib.sha256(repr(pieces).encode())
    for path in sorted({Path(piece.path) for piece in pieces}):
        for file in sorted(path.glob("*")) if path.is_dir() else [path]:
            status = file.stat()
            result.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return result.hexdigest()


def documents(piece: Piece, key: str) -> Iterator[str]:
    """Yield the documents of a piece.

    Args:
        piece: The piece.
        key: Key of the text in JSON objects, or its column.

    Raises:
        InputError: If the piece cannot be read.
    """
    try:
        yield from _READERS[piece.format](piece, key)
    except OSError as error:
        raise InputError(f"cannot read {piece.path}: {error}") from error


def _files(name: str, path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError("INPUT", name, "there is no such file or folder")
    files = [path / relative for relative in sorted(visible_files(path, "INPUT"))]
    if not files:
        raise ConfigError("INPUT", name, "there is no file in this folder")
    return files


def _format_of(file: Path, format_: str) -> str:
    if format_ == "auto" and file.suffix == ".json":
        problem = "may be one document or one per line; set --format to text or jsonl"
        raise ConfigError("INPUT", str(file), problem)
    return _BY_SUFFIX.get(file.suffix, "text") if format_ == "auto" else format_


def _divide_file(file: Path, format_: str, piece_bytes: int) -> list[Piece]:
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, 2)
    except OSError as error:
        raise ConfigError("INPUT", str(file), f"cannot read it: {error.strerror}") from error
    if format_ == "parquet":
        return _divide_parquet(file)
    step = piece_bytes if format_ == "jsonl" else max(1, size)
    return [
        Piece(format_, str(file), first, min(first + step, size), min(step, size - first))
        for first in range(0, size, step)
    ]


def _divide_parquet(file: Path) -> list[Piece]:
    parquet = _import("pyarrow.parquet", file)
    try:
        metadata = parquet.read_metadata(file)
    except (OSError, ValueError) as error:
        raise ConfigError("INPUT", str(file), f"is not a parquet file: {error}") from error
    return [
        Piece("parquet", str(file), i, i + 1, metadata.row_group(i).total_byte_size)
        for i in range(metadata.num_row_groups)
    ]


def _divide_dataset(path: Path, piece_bytes: int) -> list[Piece]:
    rows = _open_dataset(path)
    size = sum(file.stat().st_size for file in path.glob("*.arrow"))
    step = max(1, len(rows) * piece_bytes // max(1, size))
    return [
        Piece("dataset", str(path), first, last, size * (last - first) // len(rows))
        for first in range(0, len(rows), step)
        for last in [min(first + step, len(rows))]
    ]


def _open_dataset(path: Path) -> Any:
    datasets = _import("datasets", path)
    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError("INPUT", str(path), f"is not a saved dataset: {error}") from error


def _import(module: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        problem = f"needs the package {error.name}; install it with `pip install datasets`"
        raise ConfigError("INPUT", str(path), problem) from error


def _read_text(piece: Piece, key: str) -> Iterator[str]:
    content = Path(piece.path).read_bytes()
    try:
        yield content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{piece.path}: byte {error.start} is not UTF-8; convert the file or leave it out"
        ) from error


def _read_jsonl(piece: Piece, key: str) -> Iterator[str]:
    """Yield the texts of the lines that start inside the piece."""
    with open(piece.path, "rb") as file:
        if piece.first:
            file.seek(piece.first - 1)
            file.readline()
        while (position := file.tell()) < piece.last:
            if line := file.readline().strip():
                yield _text_of(line, key, f"{piece.path}: the line at byte {position:,}")


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {error}; fix or remove this line") from error
    if not isinstance(value, dict):
        raise InputError(f"{place} is not an object with a key {key!r}")
    return _checked(value.get(key), key, sorted(value), place)


def _read_parquet(piece: Piece, key: str) -> Iterator[str]:
    parquet = _import("pyarrow.parquet", Path(piece.path))
    with parquet.ParquetFile(piece.path) as file:
        place = f"{piece.path}: a row of group {piece.first}"
        columns = file.schema_arrow.names
        _require_column(key, columns, piece.path)
        batches = file.iter_batches(_ROWS, row_groups=[piece.first], columns=[key])
        for batch in batches:
            for value in batch.column(0).to_pylist():
                yield _checked(value, key, columns, place)


def _read_dataset(piece: Piece, key: str) -> Iterator[str]:
    rows = _open_dataset(Path(piece.path))
    _require_column(key, rows.column_names, piece.path)
    texts = rows.select_columns([key])
    for first in range(piece.first, piece.last, _ROWS):
        values = texts[first : min(first + _ROWS, piece.last)][key]
        for row, value in enumerate(values, first):
            yield _checked(value, key, rows.column_names, f"{piece.path}: row {row:,}")


def _require_column(key: str, columns: Sequence[str], path: str) -> None:
    if key not in columns:
        raise InputError(f"{path}: has no column {key!r}; set --key to one of {', '.join(columns)}")


def _checked(value: object, key: str, keys: Sequence[str], place: str) -> str:
    if not isinstance(value, str):
        problem = (
            f"has a value of type {type(value).__name__} for {key!r}; use a string"
            if key in keys
            else (f"has no key {key!r}; set --key to one of {', '.join(keys)}")
        )
        raise InputError(f"{place} {problem}")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InputError(
            f"{place} has an unpaired surrogate, which UTF-8 cannot represent; fix its text"
        )
    return value


_READERS: dict[str, Callable[[Piece, str], Iterator[str]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
}
