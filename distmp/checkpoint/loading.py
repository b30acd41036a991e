"""Reads a checkpoint: verifies it, and loads its tensors without running code from it."""

from __future__ import annotations

import io
import logging
import math
import pickle
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from distmp.checkpoint import dcp, manifest
from distmp.checkpoint.manifest import FileSum, State
from distmp.checkpoint.storage import INDEX_FILE, all_or_checkpoint_error, named_step
from distmp.distributed.failing_together import Failure, Ranks, describe
from distmp.errors import LISTED, CheckpointError
from distmp.utils.files import read_regular
from distmp.utils.flat_shard import global_shape

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


def read_index(path: Path, files: dict[str, FileSum]) -> Metadata:
    """Read and check the index of the checkpoint at `path`.

    Args:
        path: Directory of the checkpoint.
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
            if not isinstance(tensor.properties.dtype, torch.dtype):
                raise CheckpointError(f"{name!r} has the dtype {tensor.properties.dtype!r}")
            parts = {  # without empty ones, of ranks that hold none of the tensor
                tuple(part.offsets): math.prod(part.sizes)
                for part in tensor.chunks
                if 0 not in part.sizes
            }
            if sum(parts.values()) != math.prod(tensor.size):
                raise CheckpointError(f"its parts of {name!r} are not the whole tensor")
        for entry in (index.storage_data or {}).values():
            if entry.relative_path not in files:
                raise CheckpointError(f"there is no {path / entry.relative_path}")
    except Exception as error:
        raise CheckpointError(f"{file} cannot be used: {describe(error)}") from error
    return index


logger = logging.getLogger("distmp")


class StoredCheckpoint:
    """A checkpoint on storage: verified by all ranks together, then loaded into live tensors.

    `state.json` and the index of the tensors are read once, when they are first used.

    Args:
        path: Directory of the checkpoint.

    Attributes:
        path: Directory of the checkpoint.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from distmp.checkpoint import saving
        >>> from distmp.checkpoint.loading import StoredCheckpoint
        >>> path = saving.save(Path("saved"), 7, {"average": torch.ones(3)}, {"epoch": 1}, keep=2)
        >>> tensors = {"average": torch.zeros(3)}
        >>> others = StoredCheckpoint(path).load(tensors)
        >>> tensors["average"]
        tensor([1., 1., 1.])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._verified = False
        self._converted: set[tuple[torch.dtype, torch.dtype]] = set()  # logged already

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def state(self) -> State:
        """The content of `state.json`.

        Raises:
            CheckpointError: If it is missing, damaged, or has a later format than this version
                reads.
        """
        return manifest.read(self.path)

    @cached_property
    def index(self) -> Metadata:
        """The index of the tensors, in the format of torch.distributed.checkpoint (DCP).

        Raises:
            CheckpointError: If it is damaged, would run code, or does not describe tensors in files
                of the checkpoint.
        """
        return read_index(self.path, self.state.files)

    @property
    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Global shape and dtype of every tensor, by name. Raises the errors of `index`."""
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self.index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)  # `read_index` allows nothing else
        }

    def verify(self) -> None:
        """Compare the files with their checksums. Collective over all ranks.

        Each data file is read by one of the ranks.

        Raises:
            CheckpointError: The same on all ranks, if the checkpoint is damaged or has a later
                format than this version reads.
        """
        ranks = Ranks(None)
        crc32 = ranks.all_or_none(
            lambda: self._verify_share(ranks), catch=Exception, error=self._unusable
        )
        if any(other != crc32 for other in ranks.gather(crc32)):
            raise CheckpointError(
                f"{self.path} is not the same on all ranks (all hosts must read the same, shared "
                "storage)"
            )
        self._verified = True

    def _unusable(self, failures: dict[int, Failure], _: int) -> CheckpointError:
        problems = sorted({failure.message for failure in failures.values()})
        return CheckpointError(f"{self.path} cannot be used: {'; '.join(problems)}")

    def load(self, tensors: dict[str, Tensor]) -> list[str]:
        """Copy the stored values into `tensors`, in place. Collective over all ranks.

        Calls `verify` first if it was not called before.

        Args:
            tensors: Plain tensors, DTensors and flat shards by name, with the same names on all
                ranks and any world size and sharding. Values are converted to their dtypes; that is
                logged, as it may lose precision.

        Returns:
            Sorted names of stored tensors that `tensors` lacks.

        Raises:
            CheckpointError: The same on all ranks, if the checkpoint is damaged, would run code, or
                lacks a tensor or has it in another shape. `tensors` are unchanged in these cases.
        """
        ranks = Ranks(None)
        goal = f"load {self.path}"
        if not self._verified:
            self.verify()
        all_or_checkpoint_error(ranks, goal, lambda: self.check_fit(tensors))
        self._report_conversions(tensors, ranks)
        dcp.read(goal, self.path, self.index, tensors, ranks)
        return sorted(self.index.state_dict_metadata.keys() - tensors.keys())

    def _verify_share(self, ranks: Ranks) -> int:
        """Check the files that this rank verifies; return the CRC-32 of `state.json`."""
        step = named_step(self.path)
        if step not in (None, self.state.step):
            raise CheckpointError(
                f"its directory is named after step {step}, but it holds step {self.state.step}"
            )
        files = self.state.files
        # In the order of the ranks that wrote them: at the same world size a rank verifies the file
        # that it wrote (which its host may still cache) and that it is going to load.
        for name in list(files)[ranks.rank :: ranks.world_size]:
            manifest.verify_file(self.path / name, files[name])
        _ = self.index  # `load` needs it on every rank
        return self.state.crc32

    def check_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the stored values can be loaded into `tensors`, without communication.

        Raises:
            CheckpointError: If one is missing or has another shape; the message names some.
        """
        misfits = list(islice(_misfits(tensors, self.tensors), LISTED + 1))
        if misfits:
            more = "; and more" if len(misfits) > LISTED else ""
            raise CheckpointError(f"it does not fit: {'; '.join(misfits[:LISTED])}{more}")

    def _report_conversions(self, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        stored = self.tensors
        conversions = {(stored[name][1], tensor.dtype) for name, tensor in tensors.items()}
        conversions -= self._converted
        self._converted |= conversions
        lines = sorted(f"{old} to {new}" for old, new in conversions if old != new)
        if lines and ranks.rank == 0:
            logger.warning("tensors of %s are converted from %s", self.path, ", ".join(lines))


def _misfits(
    tensors: Mapping[str, Tensor], stored: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> Iterator[str]:
    """Yield a message for each tensor that the stored values cannot be copied into."""
    for name, tensor in tensors.items():
        if name not in stored:
            yield f"there is no {name!r} in it"
        elif stored[name][0] != global_shape(tensor):
            yield f"{name!r} has shape {[*stored[name][0]]} in it, not {[*global_shape(tensor)]}"
        elif tensor.is_meta:
            yield f"{name!r} is to be loaded but has no memory (device 'meta')"
