"""Writes one part of the output, a token file, atomically."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from distmp.commands.tokenize.encoder import Encoder
from distmp.commands.tokenize.sources import InputError, Piece, documents
from distmp.utils.files import replacing

# Number of characters that are encoded in one call.
_BATCH = 2**20
# Number of tokens that are counted at once.
_CHUNK = 2**22


class PartCounts(NamedTuple):
    """Size of a part.

    Attributes:
        tokens: Number of tokens, including the end-of-text tokens.
        documents: Number of documents.
    """

    tokens: int
    documents: int


@dataclass(frozen=True)
class PartWriter:
    """Writes parts; the same in every process.

    Attributes:
        folder: Folder of the parts.
        encoder: The tokenizer.
        key: Key or column of the text.
    """

    folder: Path
    encoder: Encoder
    key: str

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.encoder.dtype).newbyteorder("<")

    def path(self, index: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"part-{index:05}.bin"

    def __call__(self, index: int, pieces: Sequence[Piece]) -> PartCounts:
        """Write a part, unless it exists, and count its tokens.

        Args:
            index: Number of the part.
            pieces: Its documents.

        Raises:
            InputError: If a document cannot be read, or the part cannot be written.
        """
        path = self.path(index)
        try:
            if not path.exists():
                with replacing(path) as file:
                    for piece in pieces:
                        self._write(piece, file)
            return self._count(path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error

    def _write(self, piece: Piece, file: BinaryIO) -> None:
        end = self.encoder.end_of_text
        for batch in _batches(documents(piece, self.key)):
            for ids in self.encoder.encode(batch):
                # Without a token there is nothing to train on.
                if not len(ids):
                    continue
                if (ids == end).any():
                    raise InputError(
                        f"{piece.path}: a document contains the end-of-text token {end} of the"
                        " tokenizer; choose another one with --end-of-text"
                    )
                file.write(np.append(ids, end).astype(self._dtype).tobytes())

    def _count(self, path: Path) -> PartCounts:
        dtype, ends = self._dtype, 0
        tokens = path.stat().st_size // dtype.itemsize
        for first in range(0, tokens, _CHUNK):
            count = min(_CHUNK, tokens - first)
            ids = np.memmap(path, dtype, "r", first * dtype.itemsize, (count,))
            ends += int(np.count_nonzero(ids == self.encoder.end_of_text))
        return PartCounts(tokens, ends)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts, each of about `_BATCH` characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch
