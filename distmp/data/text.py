"""Text as bytes: the files below a directory, concatenated and divided into windows."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distmp.data.token_metadata import END_OF_FILE, VOCABULARY_SIZE
from distmp.data.tokens import Windows
from distmp.errors import ConfigError, DataError
from distmp.utils.files import sampled_digests, visible_files
from distmp.utils.settings import digest

# Suffixes of files whose text has to be extracted from records.
_RECORDS = (".jsonl", ".ndjson", ".parquet")

_TOKENIZE = (
    "run `distmp data tokenize`, and set data.source to tokens and {} to the directory that it "
    "writes"
)


def list_text_files(
    directory: Path,
    pattern: str,
    skipped_directories: Collection[str] = (),
    setting: str = "data.path",
) -> dict[str, int]:
    """Return the sizes in bytes of the files below a directory that match and are not empty.

    Their names are relative to the directory, with forward slashes, and sorted.

    Args:
        directory: The directory to search.
        pattern: Glob on the relative path: `*`, `?` and `[...]` match within one name, `**` matches
            directories. Hidden names are skipped, links to other directories followed.
        skipped_directories: Names of directories to skip.
        setting: Name of the setting that holds the directory, for error messages.

    Raises:
        ConfigError: If it is not a directory, or cannot be read, a file in it cannot be read, no
            file matches or has content, or the pattern is invalid.
    """
    error = partial(ConfigError, setting, str(directory))
    tokenize = _TOKENIZE.format(setting)
    if not os.path.isdir(directory):
        raise error(
            "is not a directory that this user can enter; name a directory of text files, or make "
            f"token ids of a file: {tokenize}"
        )
    try:
        matches = re.compile(_regular_expression(pattern)).fullmatch
    except re.error as problem:
        raise ConfigError("data.pattern", pattern, f"is not a pattern ({problem})") from problem
    names = sorted(filter(matches, visible_files(directory, setting, skipped_directories)))
    if not names:
        raise error(
            f"no file below it matches data.pattern = {pattern!r}; change data.pattern, or make "
            f"token ids of JSON Lines and parquet: {tokenize}"
        )
    for name in names:
        if name.endswith(_RECORDS):
            raise error(
                f"{name} holds records, which would be trained as they are stored; exclude it by "
                f"data.pattern, or make token ids of it: {tokenize}"
            )
    sizes = {name: _readable_size(directory, name, setting) for name in names}
    if not any(sizes.values()):
        raise error(f"all {len(sizes)} files that match {pattern!r} are empty")
    return {name: size for name, size in sizes.items() if size}


def _readable_size(directory: Path, name: str, setting: str) -> int:
    """Return the size of a file in bytes. Opens it: permissions alone do not suffice."""
    try:
        with open(directory / name, "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        problem = f"cannot read {name}: {error.strerror}; allow it or exclude it by data.pattern"
        raise ConfigError(setting, str(directory), problem) from error


def _regular_expression(pattern: str) -> str:
    """Translate a glob on paths; the standard library supports this only since Python 3.13."""
    tokens = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translate(match: re.Match[str]) -> str:
        token = match.group()
        if token.startswith("[") and len(token) > 1:
            negates = token.startswith("[!") and len(token) > len("[!]")
            return ("[^/" + token[2:] if negates else token).replace("\\", "\\\\")
        return tokens.get(token) or re.escape(token)

    return re.sub(r"\*\*/|\*\*|\[!?[^]/]+\]|.", translate, pattern, flags=re.DOTALL)


class TextDirectory(Windows):
    """Windows over the bytes of many files, with END_OF_FILE after each.

    Only names and sizes are kept in memory.

    Args:
        directory: Directory of the files.
        files: The size of each file by its name, in the order of concatenation.
        sequence_length: Tokens in a sample, T.
    """

    vocabulary_size = VOCABULARY_SIZE

    def __init__(self, directory: Path, files: Mapping[str, int], sequence_length: int) -> None:
        super().__init__((size + 1 for size in files.values()), sequence_length)
        self.directory = directory
        self.files = list(files.items())

    def digest(self) -> str:
        """Return the range that is used, and a hash of the names, sizes and samples of files."""
        files = {name: self.directory / name for name, _ in self.files}
        return f"{self.first} {self.last} {digest(sampled_digests(files))[:16]}"

    def _read_file(self, file: int, first: int, last: int) -> NDArray[np.int64]:
        tokens = np.full(last - first, END_OF_FILE, dtype=np.int64)
        name, size = self.files[file]
        end = min(last, size)
        if first < end:
            content = self._read_bytes(name, size, first, end)
            tokens[: end - first] = np.frombuffer(content, dtype=np.uint8)
        return tokens

    def _read_bytes(self, name: str, size: int, first: int, last: int) -> bytes:
        """Return bytes of a file.

        Raises:
            DataError: If it cannot be read, or its size has changed since it was indexed.
        """
        path = self.directory / name
        try:
            with open(path, "rb", buffering=0) as stream:
                found = os.fstat(stream.fileno()).st_size
                stream.seek(first)
                content = stream.read(last - first)
        except OSError as error:
            raise DataError(f"cannot read {path} any more: {error.strerror}") from error
        if found != size or len(content) != last - first:
            raise DataError(
                f"{path} had {size:,} bytes when the run started and has {found:,} now;"
                " training data must not change during a run"
            )
        return content
