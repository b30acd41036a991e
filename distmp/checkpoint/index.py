"""Reads the index of a checkpoint's tensors without running code from it.

torch.distributed.checkpoint (DCP) stores the index as a pickle and reads it with `pickle.load`,
which can run arbitrary code. Here only the plain classes that an index consists of are allowed. An
index can also declare an entry as a pickled object, which DCP would load in the same way; that is
refused, too. DCP loads the tensors themselves with `weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from distmp.checkpoint import manifest
from distmp.checkpoint.location import Location
from distmp.checkpoint.manifest import FileSum
from distmp.checkpoint.storage import INDEX_FILE
from distmp.distributed.ranks import describe
from distmp.errors import CheckpointError
from distmp.utils.files import read_regular

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

# Largest index that is read: of a thousand ranks with ten thousand tensors each, it is smaller.
_LARGEST_BYTES = 1 << 32


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"it requires {module}.{name}, which no checkpoint needs")


def read_index(path: Location, files: dict[str, FileSum]) -> Metadata:
    """Read and check the index of the checkpoint at `path`.

    Args:
        path: Folder of the checkpoint.
        files: Its files by name.

    Raises:
        CheckpointError: If it is damaged, would run code, or does not describe tensors in files of
            the checkpoint.
    """
    file = path / INDEX_FILE
    try:
        data = read_regular(file, _LARGEST_BYTES)
        manifest.check_sum(file, FileSum().extended(data), files.get(INDEX_FILE, FileSum()))
        index = _RestrictedUnpickler(io.BytesIO(data)).load()
        if not isinstance(index, Metadata):
            raise CheckpointError(f"it holds a {type(index).__name__}")
        for name, tensor in index.state_dict_metadata.items():
            if not isinstance(name, str) or not isinstance(tensor, TensorStorageMetadata):
                raise CheckpointError(f"{name!r} is not a tensor")
        for entry in (index.storage_data or {}).values():
            if entry.relative_path not in files:
                raise CheckpointError(f"there is no {path / entry.relative_path}")
    except Exception as error:
        raise CheckpointError(f"{file} cannot be used: {describe(error)}") from error
    return index
