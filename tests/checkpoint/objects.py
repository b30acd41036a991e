"""A file system of fsspec that behaves like an object store and is shared by all processes."""

from __future__ import annotations

from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

URL = "objects://"


class ObjectStore(LocalFileSystem):
    """An object store shared by all processes: no rename of folders, and no empty folders."""

    protocol = "objects"
    cachable = False

    def mv(self, path1: str, path2: str, **kwargs: object) -> None:
        """Copy and remove one object, like object stores."""
        assert self.isfile(path1), "an object store moves no folders"
        self.cp_file(path1, path2)
        self.rm_file(path1)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing."""

    def open(self, path: str, mode: str = "rb", **kwargs: object) -> object:
        """Open a file; writing creates its folder."""
        if "w" in mode:
            Path(self._strip_protocol(path)).parent.mkdir(parents=True, exist_ok=True)
        return super().open(path, mode, **kwargs)


fsspec.register_implementation("objects", ObjectStore, clobber=True)
