"""Windows over the tokens of files, and token files: ids of one integer type, without a header."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from distmp.data.token_metadata import NAME as METADATA
from distmp.data.token_metadata import UNFINISHED_SUFFIX, TokenMetadata
from distmp.errors import ConfigError, DataError, require
from distmp.utils.files import sampled_digests
from distmp.utils.settings import digest

W = TypeVar("W", bound="Windows")


class Windows(Dataset[dict[str, Tensor]], ABC):
    """Map-style dataset of windows over the tokens of files.

    Sample i is the window of `sequence_length + 1` tokens that starts at token
    `first + i * sequence_length`; a last partial window is dropped. A sample is read from its files
    on access, and no file stays open, so copies in worker processes are safe and cheap.

    Args:
        counts: Number of tokens of each file.
        sequence_length: Tokens in a sample, T.

    Attributes:
        starts: File f holds the tokens `starts[f]` to `starts[f + 1] - 1`; int64 [files + 1].
        first: First token of the part to use.
        last: Token after the part to use.
    """

    draws_nothing = True

    def __init__(self, counts: Iterable[int], sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.starts = np.cumsum([0, *counts], dtype=np.int64)
        self.first = 0
        self.last = int(self.starts[-1])

    def part(self: W, first: int, last: int) -> W:
        """Return the dataset of the tokens `first` to `last - 1`."""
        part = copy.copy(self)
        part.first, part.last = first, last
        return part

    def __len__(self) -> int:
        """Return the number of complete windows."""
        return max(0, (self.last - self.first - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return {"inputs": int64 [T], "targets": int64 [T]}; targets are shifted by one token.

        Raises:
            DataError: If a file cannot be read any more, or has changed.
            IndexError: If there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = self.first + index * self.sequence_length
        window = torch.from_numpy(self._read(first, first + self.sequence_length + 1))
        return {"inputs": window[:-1], "targets": window[1:]}

    def _read(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the tokens `first` to `last - 1`."""
        pieces = []
        while first < last:
            file = int(np.searchsorted(self.starts, first, side="right")) - 1
            start, end = int(self.starts[file]), min(last, int(self.starts[file + 1]))
            pieces.append(self._read_file(file, first - start, end - start))
            first = end
        return np.concatenate(pieces)

    @abstractmethod
    def _read_file(self, file: int, first: int, last: int) -> NDArray[np.int64]:
        """Return tokens of one file.

        Args:
            file: Number of the file.
            first: First token, counted from the start of the file.
            last: Token after the last one.
        """


def count_tokens(path: Path, dtype: str, setting: str = "data.path") -> int:
    """Return the number of tokens in a file.

    Args:
        path: The file.
        dtype: numpy name of the type of an id.
        setting: Name of the setting that holds the path, for error messages.

    Raises:
        ConfigError: If it cannot be read, or its size is not a multiple of the type's.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = file.seek(0, 2)
    except OSError as error:
        raise ConfigError(setting, str(path), f"cannot read it: {error.strerror}") from error
    item = np.dtype(dtype).itemsize
    problem = (
        f"its size of {size:,} bytes is not a multiple of {item}, the size of {dtype}; check its"
        " tokens.json, or write the file again"
    )
    require(size % item == 0, setting, str(path), problem)
    return size // item


class TokenFiles(Windows):
    """Windows over the ids of files.

    Each access maps only one window into memory, so files may be larger than memory.

    Args:
        files: Files of ids, little-endian, without a header.
        dtype: numpy name of the type of an id.
        vocabulary_size: Number of different ids. A sample with another id is a `DataError`.
        sequence_length: Tokens in a sample, T.
        setting: Name of the setting that holds the path of the files, for error messages.

    Raises:
        ConfigError: If a file cannot be read, or its size is not a multiple of the type's.
    """

    def __init__(
        self,
        files: Sequence[Path],
        dtype: str,
        vocabulary_size: int,
        sequence_length: int,
        setting: str = "data.path",
    ) -> None:
        super().__init__((count_tokens(file, dtype, setting) for file in files), sequence_length)
        self.files = list(files)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.vocabulary_size = vocabulary_size

    def digest(self) -> str:
        """Return the type of the ids, the range that is used, and a hash of samples of files."""
        files = {file.name: file for file in self.files}
        return f"{self.dtype.name} {self.first} {self.last} {digest(sampled_digests(files))[:16]}"

    def _read_file(self, file: int, first: int, last: int) -> NDArray[np.int64]:
        path = self.files[file]
        offset = first * self.dtype.itemsize
        try:
            mapped = np.memmap(path, self.dtype, mode="r", offset=offset, shape=(last - first,))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path} any more: {error}") from error
        ids = mapped.astype(np.int64)
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocabulary_size))
        if wrong.size:
            raise DataError(
                f"{path}: token {first + wrong[0]:,} is {ids[wrong[0]]}, outside the"
                f" vocabulary of {self.vocabulary_size:,}; check its tokens.json"
            )
        return ids


def open_tokens(
    directory: Path, sequence_length: int, setting: str
) -> tuple[TokenFiles, TokenMetadata]:
    """Open a directory of token files.

    Args:
        directory: The directory, which has a `tokens.json`.
        sequence_length: Tokens in a sample.
        setting: Name of the setting that holds the path, for error messages.

    Returns:
        The dataset, and its metadata.

    Raises:
        ConfigError: If the files cannot be read, or contradict their metadata.
    """
    unfinished = directory.with_name(directory.name + UNFINISHED_SUFFIX)
    problem = "is not finished; remove it and run `distmp data tokenize` again"
    is_unfinished = os.path.isdir(unfinished) and not os.path.exists(directory)
    require(not is_unfinished, setting, str(directory), problem)
    metadata = TokenMetadata.read(directory, setting)
    files = [directory / name for name in metadata.files]
    tokens = TokenFiles(files, metadata.dtype, metadata.vocabulary_size, sequence_length, setting)
    for file, count in zip(files, np.diff(tokens.starts).tolist(), strict=True):
        problem = (
            f"{file.name} has {count:,} tokens, not the {metadata.files[file.name]:,} of"
            f" {METADATA}; copy the directory again, or tokenize the data again"
        )
        require(count == metadata.files[file.name], setting, str(directory), problem)
    return tokens, metadata


def check_validation(train: TokenMetadata, validation: TokenMetadata, directory: Path) -> None:
    """Refuse data for validation that was tokenized in another way.

    Args:
        train: Metadata of the training data.
        validation: Metadata of the data for validation.
        directory: Its directory.

    Raises:
        ConfigError: If tokenizers or ends of documents differ, or it has more token ids.
    """
    ours = (train.tokenizer_sha256, train.end_of_text)
    problem = (
        f"was made with the tokenizer {validation.tokenizer!r} and token {validation.end_of_text}"
        f" after each document, data.path with {train.tokenizer!r} and {train.end_of_text};"
        " tokenize both in the same way"
    )
    same = ours == (validation.tokenizer_sha256, validation.end_of_text)
    require(same, "data.validation_path", str(directory), problem)
    fits = validation.vocabulary_size <= train.vocabulary_size
    problem = (
        f"has a vocabulary of {validation.vocabulary_size:,}, data.path of"
        f" {train.vocabulary_size:,}; tokenize both in the same way, or correct {METADATA}"
    )
    require(fits, "data.validation_path", str(directory), problem)
