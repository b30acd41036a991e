"""Token files: consecutive ids of one integer type, without a header."""

from __future__ import annotations

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


class TokenFile(Dataset[dict[str, Tensor]]):
    """Map-style dataset of windows over the ids of one file.

    Sample i is the window of `sequence_length + 1` ids that starts at token
    `first + i * sequence_length`; a last partial window is dropped. Each access maps only its own
    window into memory, so copies in worker processes are cheap.

    Args:
        path: File of ids, little-endian, without a header.
        dtype: numpy name of the type of an id.
        vocabulary_size: Number of different ids. A sample with another id is an error.
        sequence_length: Tokens in a sample, T.
        first: First token of the part to use.
        last: Token after the part to use; None for the end of the file.
    """

    draws_nothing = True

    def __init__(
        self,
        path: Path,
        dtype: str,
        vocabulary_size: int,
        sequence_length: int,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.vocabulary_size = vocabulary_size
        self.sequence_length = sequence_length
        self.first = first
        self.last = count_tokens(path, dtype) if last is None else last

    def __len__(self) -> int:
        """Return the number of complete windows."""
        return max(0, (self.last - self.first - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return {"inputs": int64 [T], "targets": int64 [T]}; targets are shifted by one token.

        Raises:
            DataError: If the file cannot be read, or the sample has an id outside the vocabulary.
            IndexError: If there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = torch.from_numpy(self._read(self.first + index * self.sequence_length))
        return {"inputs": window[:-1], "targets": window[1:]}

    def digest(self) -> str:
        """Return the type of the ids and the range that is used; the file is not read."""
        return f"{self.dtype.name} {self.first} {self.last}"

    def _read(self, first: int) -> NDArray[np.int64]:
        """Return the ids of the window that starts at token `first`."""
        offset = first * self.dtype.itemsize
        try:
            mapped = np.memmap(
                self.path, self.dtype, mode="r", offset=offset, shape=(self.sequence_length + 1,)
            )
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {self.path} any more: {error}") from error
        ids = mapped.astype(np.int64)
        self._check(ids, first)
        return ids

    def _check(self, ids: NDArray[np.int64], first: int) -> None:
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocabulary_size))
        if wrong.size:
            raise DataError(
                f"{self.path}: token {first + wrong[0]:,} is {ids[wrong[0]]}, outside the"
                f" vocabulary of {self.vocabulary_size:,}; check data.vocabulary_size and"
                " data.token_dtype"
            )
