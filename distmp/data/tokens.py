"""Token files: consecutive ids of one integer type, without a header."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from distmp.data.errors import DataError
from distmp.errors import ConfigError


def count_tokens(path: Path, dtype: str, setting: str = "data.path") -> int:
    """Return the number of tokens in a file.

    Args:
        path: The file.
        dtype: numpy name of the type of an id.
        setting: Name of the setting that holds the path, for error messages.

    Raises:
        ConfigError: If there is no such file, it cannot be read, or its size is not a multiple of
            the type's.
    """
    if not path.is_file():
        problem = "is a folder, not a file" if path.is_dir() else "there is no such file"
        raise ConfigError(setting, str(path), f"{problem}; name a file of {dtype} token ids")
    try:
        with open(path, "rb", buffering=0) as file:
            size = file.seek(0, 2)
    except OSError as error:
        raise ConfigError(setting, str(path), f"cannot read it: {error.strerror}") from error
    item = np.dtype(dtype).itemsize
    if size % item:
        problem = (
            f"its size of {size:,} bytes is not a multiple of {item}, the size of {dtype}; check"
            " data.token_dtype, or write the file again"
        )
        raise ConfigError(setting, str(path), problem)
    return size // item


class TokenFiles(Dataset[dict[str, Tensor]]):
    """Map-style dataset of windows over the ids of files, which are read as one sequence.

    Sample i is the window of `sequence_length + 1` ids that starts at token
    `first + i * sequence_length`; a last partial window is dropped. Each access maps only its own
    window into memory, so files may be larger than memory, and copies in worker processes are
    cheap.

    Args:
        files: Files of ids, little-endian, without a header.
        dtype: numpy name of the type of an id.
        vocabulary_size: Number of different ids. A sample with another id is an error.
        sequence_length: Tokens in a sample, T.
        setting: Name of the setting that holds the path of the files, for error messages.

    Raises:
        ConfigError: If a file cannot be read, or its size is not a multiple of the type's.
    """

    draws_nothing = True
    end_of_text: int | None = None
    """Token id that ends each document; None if it is unknown."""

    def __init__(
        self,
        files: Sequence[Path],
        dtype: str,
        vocabulary_size: int,
        sequence_length: int,
        setting: str = "data.path",
    ) -> None:
        self.files = list(files)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.vocabulary_size = vocabulary_size
        self.sequence_length = sequence_length
        counts = [count_tokens(file, dtype, setting) for file in self.files]
        # File f holds the tokens starts[f] to starts[f + 1] - 1.
        self.starts = np.cumsum([0, *counts], dtype=np.int64)
        self.first = 0
        self.last = int(self.starts[-1])

    def part(self, first: int, last: int) -> TokenFiles:
        """Return the data set of the tokens `first` to `last - 1`."""
        part = copy.copy(self)
        part.first, part.last = first, last
        return part

    def __len__(self) -> int:
        """Return the number of complete windows."""
        return max(0, (self.last - self.first - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return {"inputs": int64 [T], "targets": int64 [T]}; targets are shifted by one token.

        Raises:
            DataError: If a file cannot be read, or the sample has an id outside the vocabulary.
            IndexError: If there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = self.first + index * self.sequence_length
        window = torch.from_numpy(self._read(first, first + self.sequence_length + 1))
        return {"inputs": window[:-1], "targets": window[1:]}

    def digest(self) -> str:
        """Return the type of the ids and the range that is used; the files are not read."""
        return f"{self.dtype.name} {self.first} {self.last}"

    def _read(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the tokens `first` to `last - 1`."""
        pieces = []
        while first < last:
            file = int(np.searchsorted(self.starts, first, side="right")) - 1
            end = min(last, int(self.starts[file + 1]))
            pieces.append(self._read_file(file, first - int(self.starts[file]), end - first))
            first = end
        return np.concatenate(pieces)

    def _read_file(self, file: int, first: int, count: int) -> NDArray[np.int64]:
        path = self.files[file]
        offset = first * self.dtype.itemsize
        try:
            mapped = np.memmap(path, self.dtype, mode="r", offset=offset, shape=(count,))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path} any more: {error}") from error
        ids = mapped.astype(np.int64)
        self._check(ids, path, first)
        return ids

    def _check(self, ids: NDArray[np.int64], path: Path, first: int) -> None:
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocabulary_size))
        if wrong.size:
            raise DataError(
                f"{path}: token {first + wrong[0]:,} is {ids[wrong[0]]}, outside the"
                f" vocabulary of {self.vocabulary_size:,}; check data.vocabulary_size and"
                " data.token_dtype"
            )
