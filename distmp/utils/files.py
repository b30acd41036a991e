"""Atomic replacement of files, and reading of files that may be anything."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from distmp.errors import ConfigError

# Suffixes of files of weights and checkpoints, which the folders of distmp do not have.
_OF_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
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


def check_folder_name(setting: str, folder: str | os.PathLike[str]) -> None:
    """Refuse a folder for checkpoints or weights whose name ends like that of a file.

    Raises:
        ConfigError: If it ends with `.pt`, `.safetensors` or similar.
    """
    suffix = Path(folder).suffix
    if suffix.lower() in _OF_FILES:
        raise ConfigError(
            setting, str(folder), f"names a folder, not a file; use a name without {suffix!r}"
        )


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a regular file.

    A pipe, whose writer may never come, and a device such as `/dev/zero`, which has no end, are not
    opened.

    Args:
        path: The file, or a link to it.
        limit: Largest size in bytes.

    Raises:
        OSError: If it cannot be read, is not a regular file, or is larger.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        is_directory = stat.S_ISDIR(status.st_mode)
        raise OSError(errno.EINVAL, "Is a directory" if is_directory else "Not a regular file")
    if status.st_size > limit:
        raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {limit}")
    return path.read_bytes()
