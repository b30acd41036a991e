"""Reads the index of a checkpoint's tensors without running code from it.

torch.distributed.checkpoint (DCP) stores the index as a pickle and reads it with `pickle.load`,
which can run arbitrary code. Here only the plain classes that an index consists of are allowed. An
index can also declare an entry as a pickled object, which DCP would load in the same way; that is
refused, too. DCP loads the tensors themselves with `weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from distmp.checkpoint import manifest
from distmp.checkpoint.location import Location
from distmp.checkpoint.manifest import FileSum
from distmp.checkpoint.storage import INDEX_FILE
from distmp.distributed.ranks import describe
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
        raise CheckpointError(f"it requires {module}.{name}, which no checkpoint needs")


def read_index(
    path: Location, files: dict[str, FileSum] | None, opened: IO[bytes] | None = None
) -> Metadata:
    """Read and check the index of the checkpoint at `path`.

    Args:
        path: Folder of the checkpoint.
        files: Its files by name; None in a checkpoint without checksums.
        opened: The file of the index, if it is open already; it is closed.

    Raises:
        CheckpointError: If it is damaged, would run code, or does not describe complete tensors in
            files of the checkpoint.
    """
    file = path / INDEX_FILE
    try:
        data = file.read_bytes() if opened is None else _read_again(opened)
        if files is None:
            sizes = {entry.name: entry.stat().st_size for entry in path.iterdir()}
            _refuse_absurd(data)
        else:
            sizes = {name: written.size for name, written in files.items()}
            manifest.check_sum(file, FileSum().extended(data), files.get(INDEX_FILE, FileSum()))
        index = _RestrictedUnpickler(io.BytesIO(data)).load()
        _check_tensors(index)
        _check_files(path, index, sizes)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be used: {describe(error)}") from error
    return index


def _read_again(file: IO[bytes]) -> bytes:
    with file:
        file.seek(0)
        return file.read()


def _refuse_absurd(data: bytes) -> None:
    """Refuse an index without a checksum that could take any amount of memory to unpickle.

    The one such operation that random bytes contain stores an object in the memo under an arbitrary
    number, which allocates a list of that length. Protocol 4 of pickle, which DCP uses, has no need
    of it: it numbers the objects itself.
    """
    for opcode, _, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            raise CheckpointError(f"it uses the opcode {opcode.name}, which no checkpoint needs")


def _check_files(path: Location, index: Metadata, sizes: dict[str, int]) -> None:
    """Check that the files that the index names exist and are long enough."""
    ends: dict[str, int] = {}
    for entry in (index.storage_data or {}).values():
        name = entry.relative_path
        ends[name] = max(ends.get(name, 0), entry.offset + entry.length)
    for name, end in ends.items():
        if Path(name).name != name:
            raise CheckpointError(f"it names a file outside the checkpoint, {name!r}")
        if name not in sizes:
            raise CheckpointError(f"there is no {path / name}")
        if sizes[name] < end:
            raise CheckpointError(f"{path / name} is shorter than the {end} bytes it needs")


def _check_tensors(index: Metadata) -> None:
    if not isinstance(index, Metadata):
        raise CheckpointError(f"it holds a {type(index).__name__}")
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise CheckpointError(f"{name!r} is not a tensor")
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CheckpointError(f"{name!r} is stored incompletely")
