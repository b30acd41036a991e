"""Writes and reads the tensors of a checkpoint with torch.distributed.checkpoint (DCP).

Every rank writes and reads its own shards, replicated tensors are written once, and a checkpoint
can be loaded at another world size or with another sharding than the one it was saved with.
"""

from __future__ import annotations

import copyreg
import traceback
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.checkpoint.manifest import FileSum
from distmp.checkpoint.storage import checkpoint_error
from distmp.distributed.failing_together import Failure, Ranks, describe

# DCP sends the traceback of a rank that fails to the others. From Python 3.13 on it holds code
# objects, which cannot be pickled; torch before 2.13 fails on that and hides the error.
copyreg.pickle(
    traceback.FrameSummary, lambda f: (traceback.FrameSummary, (f.filename, f.lineno, f.name))
)


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor of any dtype holds no NaN and no infinite value.

    Takes less time than copying the tensor, and no memory, unless it has 8 bits.
    `isfinite().all()` takes ten times as long.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return all(is_finite(getattr(tensor, name)) for name in names)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.itemsize == 1:  # `aminmax` has no 8-bit floating-point types
        tensor = tensor.float()
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())  # NaN propagates to both


def write(
    goal: str,
    path: Path,
    tensors: dict[str, Tensor],
    ranks: Ranks,
    finite: Collection[str] = (),
) -> tuple[dict[str, FileSum], set[str]]:
    """Write tensors and their index to the directory `path`. Collective over `ranks`.

    Args:
        goal: Purpose, for the error.
        path: An empty directory.
        tensors: The tensors by name, see `saving.save`.
        ranks: All ranks.
        finite: Names of the tensors to check for non-finite values.

    Returns:
        Size and checksum of each file that this rank wrote, by name; and those of the tensors to
        be checked that hold NaN or infinite values.

    Raises:
        CheckpointError: On all ranks, if one of them failed; it starts with "cannot <goal>".
    """
    files, planner = _Files(), _SavePlanner(finite)
    with _one_error(ranks, goal):
        state_dict_saver.save(
            dict(tensors),
            process_group=ranks.group,
            storage_writer=_Writer(path, files),
            planner=planner,
        )
    return files.sums, planner.non_finite


def read(goal: str, path: Path, index: Metadata, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Read tensors, in place, from the directory `path`. Collective over `ranks`.

    Args:
        goal: Purpose, for the error.
        path: Directory of the checkpoint.
        index: Its index, which has been checked.
        tensors: Live tensors by name; they must fit those in the index.
        ranks: All ranks.

    Raises:
        CheckpointError: On all ranks, if one of them failed; it starts with "cannot <goal>".
    """
    with _one_error(ranks, goal):
        state_dict_loader.load(
            dict(tensors),
            process_group=ranks.group,
            storage_reader=_Reader(path, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )


@contextmanager
def _one_error(ranks: Ranks, goal: str) -> Iterator[None]:
    """Turn the error of DCP, which all ranks raise, into a `CheckpointError`.

    Silences warnings of DCP that users cannot act on: one reports that there is no process group,
    the other a deprecation inside torch 2.10. The filters stay: restoring them would undo changes
    that other threads make in the meantime.
    """
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    if not ranks.distributed:
        warnings.filterwarnings("ignore", message="torch.distributed is .*uninitialized")
    try:
        yield
    except CheckpointException as error:
        failures = {rank: Failure(_text(found), 1) for rank, (found, _) in error.failures.items()}
        raise checkpoint_error(goal, failures, ranks.world_size) from error


def _text(error: BaseException) -> str:
    # torch would advise to run the code in the file (weights_only=False).
    refused = "a file that holds its tensors is damaged, or holds other objects"
    return refused if isinstance(error, UnpicklingError) else describe(error)


class _SummedFile:
    """A file that is written sequentially, and its checksum."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.sum = FileSum()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.sum = self.sum.extended(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def fileno(self) -> int:
        # torch synchronizes this descriptor to the disk without flushing Python's buffer first.
        self._file.flush()
        return self._file.fileno()

    def flush(self) -> None:
        if not self._file.closed:  # after an error, torch's own wrapper flushes it when it is freed
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Files(filesystem.FileSystem):
    """Records the checksums of the files that it writes.

    Attributes:
        sums: Size and checksum of each written file, by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            summed = _SummedFile(file)
            try:
                yield summed
            except RuntimeError as error:  # torch's writer replaces the error of a full disk
                raise summed.error or error from None
        self.sums[path.name] = summed.sum

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.sums[new_path.name] = self.sums.pop(path.name)


class _SavePlanner(DefaultSavePlanner):
    """Checks the parts of tensors that this rank writes, when it writes them.

    Args:
        checked: Names of the tensors to check.

    Attributes:
        non_finite: Names of those with NaN or infinite values.
    """

    def __init__(self, checked: Collection[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._checked = checked
        self.non_finite: set[str] = set()

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        name = write_item.index.fqn
        if name in self._checked and isinstance(data, Tensor) and not is_finite(data):
            self.non_finite.add(name)
        return data


class _Writer(filesystem.FileSystemWriter):
    fs: Any

    def __init__(self, path: Path, files: _Files) -> None:
        super().__init__(path)
        self.fs = files

    def storage_meta(self) -> StorageMeta:
        """Omit the location: the index would hold a path of this machine."""
        return StorageMeta(save_id=self.save_id)


class _Reader(filesystem.FileSystemReader):
    """Reads with an index that is already read and checked."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the given index instead of unpickling the file."""
        return self._index
