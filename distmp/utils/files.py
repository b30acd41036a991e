"""Atomic replacement of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

# Permissions of files that may contain secrets: only the user can read them.
PRIVATE = 0o600


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    Readers see the old content or the new one, never a part. After an error the old one remains.

    Args:
        path: The file to replace or create. Its folder must exist.
        mode: Permissions of the file, reduced by the umask of this process.

    Yields:
        A binary file, open for writing.
    """
    path = Path(path)
    # In the same folder, so on the same file system: the rename is atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            # Without it a power failure may leave an empty file under the new name.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
