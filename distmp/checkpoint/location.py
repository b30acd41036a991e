"""Locations of checkpoints: a local path, or any file system of fsspec (`s3://...`).

`RemotePath` has the methods of `pathlib.Path` that checkpoints need, so that most code works with
both. An object store cannot rename; see `storage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from distmp.errors import CheckpointError, ConfigError
from distmp.utils.files import read_regular

_LOCAL_SCHEMES = ("file", "local")


class _Stat(NamedTuple):
    st_size: int


class RemotePath:
    """A path on a file system of fsspec.

    Args:
        file_system: A `fsspec.AbstractFileSystem`.
        path: The path in the form of that file system.
        url: The URL that the user gave.
    """

    def __init__(self, file_system: Any, path: str, url: str) -> None:
        self._file_system = file_system
        self._path = path.rstrip("/")
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._file_system, f"{self._path}/{name}", f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return PurePosixPath(self._path).name

    @property
    def parent(self) -> RemotePath:
        """The path without its last component."""
        return RemotePath(
            self._file_system, self._path.rpartition("/")[0], self._url.rpartition("/")[0]
        )

    def resolve(self) -> RemotePath:
        """Return the path itself: there are no links."""
        return self

    absolute = resolve

    def exists(self) -> bool:
        """Return whether there is a file, or anything below this path."""
        return bool(self._fresh().exists(self._path))

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return bool(self._fresh().isfile(self._path))

    def is_dir(self) -> bool:
        """Return whether there is anything below this path."""
        return bool(self._fresh().isdir(self._path))

    def stat(self) -> _Stat:
        """Return the size of the file, in bytes."""
        return _Stat(self._fresh().info(self._path)["size"])

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the paths directly below this one."""
        for entry in self._fresh().ls(self._path, detail=False):
            if entry.rstrip("/") != self._path:
                yield self / PurePosixPath(entry).name

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Create a folder and its parents, where the file system has folders."""
        self._file_system.makedirs(self._path, exist_ok=exist_ok)

    def open(self, mode: str) -> IO[bytes]:
        """Open the file to read ("rb") or write ("wb") bytes."""
        return self._fresh().open(self._path, mode)

    def read_bytes(self) -> bytes:
        """Return the content of the file."""
        return self._fresh().cat_file(self._path)

    def write_bytes(self, data: bytes) -> int:
        """Write the file, atomically where the file system can."""
        self._file_system.pipe_file(self._path, data)
        return len(data)

    def create(self, data: bytes) -> None:
        """Write a new file. Atomic on memory, S3, GCS and others with conditional writes.

        Raises:
            FileExistsError: If the file exists.
        """
        if self.exists():  # not all file systems know the mode
            raise FileExistsError(str(self))
        self._file_system.pipe_file(self._path, data, mode="create")

    def rename(self, target: RemotePath) -> RemotePath:
        """Move a file. Most object stores copy it, so that both paths exist for a while."""
        self._file_system.mv(self._path, target._path)
        return target

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        if not missing_ok or self.exists():
            self._file_system.rm_file(self._path)

    def remove_tree(self) -> None:
        """Remove everything at and below this path."""
        self._file_system.rm(self._path, recursive=True)

    def _fresh(self) -> Any:
        """Return the file system without cached listings, as other ranks may have written files."""
        self._file_system.invalidate_cache()
        return self._file_system


Location = Path | RemotePath


def locate(setting: str, text: str) -> Location:
    """Return the location that a setting names: a local path, or a URL for fsspec.

    Args:
        setting: Dotted name of the setting.
        text: Its value.

    Raises:
        ConfigError: If fsspec does not support the protocol, or lacks a package for it.
    """
    scheme, separator, path = text.partition("://")
    if not separator:
        return Path(text)
    if scheme in _LOCAL_SCHEMES:
        return Path(path)
    from fsspec.core import url_to_fs  # takes a fifth of a second to import

    try:
        file_system, path = url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise ConfigError(setting, text, f"cannot be reached: {error}") from error
    return RemotePath(file_system, path, text)


def read_bytes(path: Location, limit: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        limit: Largest size in bytes.

    Raises:
        OSError: If a local file cannot be read, is not a regular file, or is larger.
        CheckpointError: If a remote file is larger. File systems of fsspec raise other types, too.
    """
    if not isinstance(path, RemotePath):
        return read_regular(path, limit)
    if (size := path.stat().st_size) > limit:
        raise CheckpointError(f"{path} has {size} bytes, more than {limit}")
    return path.read_bytes()


def check_reachable(checkpoint_path: str | None, resume: str | None) -> None:
    """Check on this rank that fsspec supports the configured locations.

    Args:
        checkpoint_path: Setting `checkpoint.path`.
        resume: Setting `resume`.

    Raises:
        ConfigError: If fsspec does not support one of them, or lacks a package for it.
    """
    for setting, text in (("checkpoint.path", checkpoint_path), ("resume", resume)):
        if text is not None:
            locate(setting, text)
