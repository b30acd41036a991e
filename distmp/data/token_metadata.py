"""Metadata of tokenized data: `tokens.json`, in the folder of the token files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmp.errors import ConfigError
from distmp.utils.files import read_regular, replacing

NAME = "tokens.json"
UNFINISHED_SUFFIX = ".partial"
"""Appended to the name of a folder while `distmp data tokenize` fills it."""

END_OF_FILE = 256
"""Token after each file whose bytes are the tokens."""
VOCABULARY_SIZE = 257
"""The 256 bytes and END_OF_FILE."""

_FORMAT = 1
_LARGEST_BYTES = 2**28


@dataclass(frozen=True)
class TokenMetadata:
    """Describes the token files of a folder.

    Attributes:
        dtype: numpy name of the type of an id.
        vocabulary_size: Number of ids of the tokenizer.
        end_of_text: Id after each document. It occurs nowhere else, so it marks the boundaries of
            documents.
        tokenizer: Name of the tokenizer.
        tokenizer_sha256: Hash of its definition, hexadecimal; None for the built-in one of bytes.
        documents: Number of documents in all files.
        tokens: Number of tokens in all files, including `end_of_text`.
        files: Number of tokens of each file, by name, in the order in which they are read.
    """

    dtype: str
    vocabulary_size: int
    end_of_text: int
    tokenizer: str
    tokenizer_sha256: str | None
    documents: int
    tokens: int
    files: Mapping[str, int]

    def write(self, folder: Path) -> None:
        """Write `tokens.json` in a folder, atomically."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        with replacing(folder / NAME) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")

    @classmethod
    def read(cls, folder: Path, setting: str = "data.path") -> TokenMetadata:
        """Read `tokens.json` in a folder.

        Args:
            folder: The folder.
            setting: Name of the setting that holds the folder, for error messages.

        Raises:
            ConfigError: If it cannot be read, or was written by a later version.
        """
        file = folder / NAME
        try:
            content: dict[str, Any] = json.loads(read_regular(file, _LARGEST_BYTES))
            found = content.pop("format")
            metadata = cls(**content) if found == _FORMAT else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"cannot read {file}: {error}; tokenize the data again"
            raise ConfigError(setting, str(folder), problem) from error
        if metadata is None:
            problem = f"{file} has format {found!r}; this version of distmp reads {_FORMAT}"
            raise ConfigError(setting, str(folder), problem)
        return metadata


def metadata_of(path: Path, setting: str = "data.path") -> TokenMetadata | None:
    """Return the metadata of a folder of token files or of one of its files; None without any.

    Args:
        path: The folder or file.
        setting: Name of the setting that holds the path, for error messages.

    Raises:
        ConfigError: If the metadata cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / NAME).exists():
        return None
    metadata = TokenMetadata.read(folder, setting)
    return metadata if path.is_dir() or path.name in metadata.files else None
