"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the place of `path` when the block ends without an error.

    Readers see the old content or the new one, never a part; after an error the old one stays.

    Args:
        path: The file to replace or create. Its folder must exist.

    Yields:
        A file open for writing bytes.
    """
    path = Path(path)
    # Same folder, hence same file system, hence an atomic rename.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Without it a power cut may leave the new name on an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
