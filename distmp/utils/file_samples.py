"""Digests of files that read a bounded number of bytes, the same ones on every machine."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

# This limits the time to about a second, also on a network file system.
TOTAL_BYTES = 16 << 20
_MOST_BLOCKS = 256
_BLOCK_BYTES = 4096


def sampled_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the size and a digest of each file, or why it cannot be read.

    Of large files the beginning, the end and blocks at pseudo-random offsets are read, and of more
    than 4,096 files only the sizes.

    Args:
        files: The files by the names that they have on every machine.
    """
    blocks = min(_MOST_BLOCKS, TOTAL_BYTES // (_BLOCK_BYTES * max(1, len(files))))
    return {name: _sample(path, blocks) for name, path in files.items()}


def _sample(path: Path, blocks: int) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            for offset in _offsets(size, blocks):
                digest.update(os.pread(file.fileno(), _BLOCK_BYTES, offset))
    except OSError as error:
        return f"not readable ({error.strerror})"
    return f"{size:,} bytes {digest.hexdigest()[:16]}"


def _offsets(size: int, blocks: int) -> Iterator[int]:
    if size <= blocks * _BLOCK_BYTES:
        yield from range(0, size, _BLOCK_BYTES)
    elif blocks:
        chosen = random.Random(size)
        yield from (0, size - _BLOCK_BYTES)
        yield from (chosen.randrange(size - _BLOCK_BYTES) for _ in range(blocks - 2))
