"""Reads the index of a checkpoint's tensors without running code from it.

torch.distributed.checkpoint (DCP) stores the index as a pickle and reads it with `pickle.load`,
which can run arbitrary code. Here only the plain classes that an index consists of are allowed. An
index can also declare an entry as a pickled object, which DCP would load in the same way; that is
refused, too. DCP loads the tensors themselves with `weights_only=True`.
"""

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from distmp.checkpoint import manifest
from distmp.checkpoint.location import Location, read_bytes
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

# Largest index that is read: of a thousand ranks with ten thousand tensors each, it is smaller.
_LARGEST_BYTES = 1 << 32
# Largest index with a checksum that is scanned before it is unpickled.
_SCANNED_BYTES = 1 << 24
# A divided tensor has 2^dimensions corners.
_MOST_DIMENSIONS = 16


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"it requires {module}.{name}, which no checkpoint needs")


def read_index(
    path: Location, files: dict[str, FileSum], opened: IO[bytes] | None = None
) -> Metadata:
    """Read and check the index of the checkpoint at `path`.

    Args:
        path: Folder of the checkpoint.
        files: Its files by name.
        opened: The file of the index, if it is open already; it is closed.

    Raises:
        CheckpointError: If it is damaged, would run code, or does not describe complete tensors in
            files of the checkpoint.
    """
    file = path / INDEX_FILE
    try:
        data = read_bytes(file, _LARGEST_BYTES) if opened is None else _read_again(opened)
        sizes = {name: written.size for name, written in files.items()}
        manifest.check_sum(file, FileSum().extended(data), files.get(INDEX_FILE, FileSum()))
        if len(data) <= _SCANNED_BYTES:
            _refuse_absurd(data)
        index = _RestrictedUnpickler(io.BytesIO(data)).load()
        if not isinstance(index, Metadata):
            raise CheckpointError(f"it holds a {type(index).__name__}")
        for name, tensor in index.state_dict_metadata.items():
            _check_tensor(name, tensor, index.storage_data or {})
        _check_files(path, index, sizes)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be used: {describe(error)}") from error
    return index


def _read_again(file: IO[bytes]) -> bytes:
    with file:
        file.seek(0)
        return file.read()


def _refuse_absurd(data: bytes) -> None:
    """Refuse an index that could take any amount of memory to unpickle.

    The one such operation that random bytes contain stores an object in the memo under an arbitrary
    number, which allocates a list of that length. Protocol 4 of pickle, which DCP uses, has no need
    of it: it numbers the objects itself. The scan takes as long as unpickling.
    """
    for opcode, _, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            raise CheckpointError(f"it uses the opcode {opcode.name}, which no checkpoint needs")


def _check_files(path: Location, index: Metadata, sizes: dict[str, int]) -> None:
    """Check that the files that the index names exist, and that its parts do not overlap."""
    ends: dict[str, int] = {}
    entries = (index.storage_data or {}).values()
    for entry in sorted(entries, key=lambda entry: (entry.relative_path, entry.offset)):
        name = manifest.check_name(entry.relative_path)
        if entry.offset < ends.get(name, 0):
            raise CheckpointError(f"it reads the same bytes of {path / name} twice")
        ends[name] = entry.offset + entry.length
    for name, end in ends.items():
        if name not in sizes:
            raise CheckpointError(f"there is no {path / name}")
        if sizes[name] < end:
            raise CheckpointError(f"{path / name} is shorter than the {end} bytes it needs")


def _check_tensor(name: Any, tensor: Any, stored: dict[MetadataIndex, Any]) -> None:
    """Check that the parts of a tensor cover it exactly, and that each is stored completely."""
    if not isinstance(name, str) or not isinstance(tensor, TensorStorageMetadata):
        raise CheckpointError(f"{name!r} is not a tensor")
    chunks = [chunk for chunk in tensor.chunks if chunk.sizes.numel()]
    if sum(chunk.sizes.numel() for chunk in chunks) != tensor.size.numel():
        raise CheckpointError(f"{name!r} is stored incompletely")
    if not all(_is_inside(chunk, tensor.size) for chunk in chunks):
        raise CheckpointError(f"{name!r} has a part outside of its shape {[*tensor.size]}")
    if len(chunks) > 1 and _overlap(chunks, tensor.size):
        raise CheckpointError(f"{name!r} has parts that overlap")
    for chunk in chunks:
        entry = stored.get(MetadataIndex(name, chunk.offsets))
        if entry is None or getattr(entry, "transform_descriptors", None):
            raise CheckpointError(f"{name!r} is stored incompletely, or compressed")
        if entry.length < chunk.sizes.numel() * tensor.properties.dtype.itemsize:
            raise CheckpointError(f"{name!r} is stored in fewer bytes than it has")


def _is_inside(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
        offset >= 0 and length > 0 and offset + length <= whole
        for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )


def _overlap(chunks: list[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Return whether parts that have as many elements as the tensor overlap.

    Modulo 2, the number of parts that cover an element is determined by the corners that belong to
    an odd number of parts. If these are the corners of the tensor, every element is covered an odd
    number of times, and since the sizes add up, once.
    """
    if len(size) > _MOST_DIMENSIONS:
        return True
    corners: set[tuple[int, ...]] = set()
    for part in (ChunkStorageMetadata(torch.Size([0] * len(size)), size), *chunks):
        ranges = zip(part.offsets, part.sizes, strict=True)
        corners ^= set(itertools.product(*((start, start + length) for start, length in ranges)))
    return bool(corners)
