"""The index of a checkpoint's tensors, read without running code from it.

torch.distributed.checkpoint (DCP) keeps the index as a pickle and reads it with `pickle.load`,
which runs whatever the file says. Here only the plain classes that an index is made of are allowed.
An index can also declare an entry to be a pickled object, which DCP would load the same way; that
is refused too. The tensors themselves DCP loads with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from distmp.checkpoint.layout import INDEX_FILE
from distmp.errors import CheckpointError

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"it asks for {module}.{name}, which no checkpoint needs")


class IndexedReader(FileSystemReader):
    """DCP's reader with an index that has been read and checked before."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the given index instead of unpickling the file."""
        return self._index


def read_index(path: Path) -> Metadata:
    """Read and check the index of the checkpoint at `path`.

    Raises:
        CheckpointError: If it cannot be read, would run code, or does not describe whole tensors
            in files that are there.
    """
    try:
        with (path / INDEX_FILE).open("rb") as file:
            index = _RestrictedUnpickler(file).load()
        _check_tensors(index)
        check_files(path, index)
    except Exception as error:
        problem = str(error) if isinstance(error, CheckpointError) else repr(error)
        raise CheckpointError(f"{path / INDEX_FILE} cannot be used: {problem}") from error
    return index


def check_files(path: Path, index: Metadata) -> None:
    """Check that the files which the index names are there, in full length.

    Raises:
        CheckpointError: If one is missing, too short, or outside the checkpoint.
    """
    ends: dict[str, int] = {}
    for entry in (index.storage_data or {}).values():
        name = entry.relative_path
        ends[name] = max(ends.get(name, 0), entry.offset + entry.length)
    for name, end in ends.items():
        if Path(name).name != name:
            raise CheckpointError(f"it names a file outside the checkpoint, {name!r}")
        if not (path / name).is_file():
            raise CheckpointError(
                f"there is no {path / name} (all hosts must write to the same, shared storage)"
            )
        if (path / name).stat().st_size < end:
            raise CheckpointError(f"{path / name} is shorter than the {end} bytes it should have")


def _check_tensors(index: Metadata) -> None:
    if not isinstance(index, Metadata):
        raise CheckpointError(f"it holds a {type(index).__name__}")
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise CheckpointError(f"{name!r} is not a tensor")
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CheckpointError(f"{name!r} is stored incompletely")
