"""Digests of files that read a bounded number of bytes, the same ones on every machine."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

# Together they limit the time to about a second, also on a network file system.
TOTAL_BYTES = 16 << 20
_FILE_BYTES = 1 << 20
_CHUNK_BYTES = 4096
_MOST_FILES = 1024


def sampled_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the size and a digest of each file, or why it cannot be read.

    Files of up to a few KiB are read completely, of larger ones the beginning, the end and blocks
    at pseudo-random offsets. Of more than 1,024 files only so many are opened, selected by a hash
    of their names; for the others only the size is returned.

    Args:
        files: The files by the names that they have on every machine.
    """
    opened = set(sorted(files, key=_hash)[:_MOST_FILES])
    share = min(_FILE_BYTES, TOTAL_BYTES // max(1, len(opened)))
    return {
        name: _sample(path, share) if name in opened else _size(path)
        for name, path in files.items()
    }


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _size(path: Path) -> str:
    try:
        return f"{path.stat().st_size:,} bytes"
    except OSError as error:
        return f"not readable ({error.strerror})"


def _sample(path: Path, share: int) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            for offset, length in _blocks(size, share):
                digest.update(os.pread(file.fileno(), length, offset))
    except OSError as error:
        return f"not readable ({error.strerror})"
    return f"{size:,} bytes {digest.hexdigest()[:16]}"


def _blocks(size: int, share: int) -> Iterator[tuple[int, int]]:
    """Yield offsets and lengths of about `share` bytes of a file."""
    if size <= share:
        yield 0, size
        return
    yield 0, _CHUNK_BYTES
    yield size - _CHUNK_BYTES, _CHUNK_BYTES
    offsets = random.Random(size)
    for _ in range(share // _CHUNK_BYTES - 2):
        yield offsets.randrange(size - _CHUNK_BYTES), _CHUNK_BYTES
