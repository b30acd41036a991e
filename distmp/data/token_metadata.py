"""Metadata of tokenized data: `tokens.json`, in the directory of the token files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmp.errors import ConfigError, require
from distmp.utils.files import read_regular, replacing

NAME = "tokens.json"
UNFINISHED_SUFFIX = ".partial"
"""Appended to the name of a directory while `distmp data tokenize` fills it."""

BYTES = "bytes"
"""Name of the tokenizer whose tokens are bytes."""

END_OF_FILE = 256
"""Token after each file whose bytes are the tokens."""
VOCABULARY_SIZE = 257
"""The 256 bytes and END_OF_FILE."""

_FORMAT = 1
_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_LARGEST_BYTES = 2**28


@dataclass(frozen=True)
class TokenMetadata:
    """Describes the token files of a directory.

    Attributes:
        dtype: numpy name of the type of an id.
        vocabulary_size: Number of ids of the tokenizer.
        files: Number of tokens of each file, by name, in the order in which they are read.
        end_of_text: Id after each document. It occurs nowhere else, so it marks the boundaries of
            documents. None if it is unknown.
        tokenizer: Name of the tokenizer.
        tokenizer_sha256: Hash of its definition, hexadecimal; None for the built-in one of bytes.
        documents: Number of documents in all files.
        tokens: Number of tokens in all files, including `end_of_text`.
    """

    dtype: str
    vocabulary_size: int
    files: Mapping[str, int]
    end_of_text: int | None = None
    tokenizer: str = "unknown"
    tokenizer_sha256: str | None = None
    documents: int = 0
    tokens: int = 0

    def write(self, directory: Path) -> None:
        """Write `tokens.json` in a directory, atomically."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        with replacing(directory / NAME) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")

    @classmethod
    def read(cls, directory: Path, setting: str = "data.path") -> TokenMetadata:
        """Read `tokens.json` in a directory.

        Args:
            directory: The directory.
            setting: Name of the setting that holds the directory, for error messages.

        Raises:
            ConfigError: If it cannot be read, or was written by a later version.
        """
        file = directory / NAME
        problem = (
            f"is no directory with {NAME}, which `distmp data tokenize` writes; describe other "
            'files of ids by {"format": 1, "dtype": "uint16", "vocabulary_size": NUMBER, '
            '"files": {"NAME": NUMBER OF IDS}}'
        )
        require(os.path.exists(file), setting, str(directory), problem)
        try:
            content: dict[str, Any] = json.loads(read_regular(file, _LARGEST_BYTES))
            if (found := content.pop("format")) != _FORMAT:
                raise ValueError(f"it has format {found!r}; this version of distmp reads {_FORMAT}")
            metadata = cls(**content)
            if metadata.dtype not in _DTYPES:
                raise ValueError(f"dtype = {metadata.dtype!r} is not one of {', '.join(_DTYPES)}")
            size = metadata.vocabulary_size
            if type(size) is not int or size < 1:
                raise ValueError(f"vocabulary_size = {size!r} is not a number of ids")
            for name, count in metadata.files.items():
                if Path(name).name != name or not isinstance(count, int):
                    problem = "names files of other directories, or has other than numbers of ids"
                    raise ValueError(f"files = {metadata.files!r} {problem}")
            return metadata
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"cannot read {file}: {error}; tokenize the data again"
            raise ConfigError(setting, str(directory), problem) from error
