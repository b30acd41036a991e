"""Datasets of windows over the tokens of files, which are read as one sequence."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

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
