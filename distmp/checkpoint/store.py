"""Saving and loading checkpoints: tensors, sharded or not, and a few numbers.

Tensors go through torch.distributed.checkpoint (DCP): every rank writes and reads its own shards,
replicated tensors are written once, and a checkpoint can be loaded at another world size or with
another sharding than it was saved with.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from distmp.checkpoint.index import IndexedReader, check_files, read_index
from distmp.checkpoint.layout import (
    NUMBERS_FILE,
    final_path,
    latest,
    prepare,
    publish,
    resolve,
    synchronize,
    tidy,
    writing_path,
)
from distmp.errors import CheckpointError
from distmp.slices import whole_shape

__all__ = ["latest", "load", "read_numbers", "resolve", "save", "stored_tensors"]

FORMAT = 1
# How many tensors that do not fit an error names.
LISTED = 5

T = TypeVar("T")

logger = logging.getLogger("distmp")


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of `step` and make it the latest. Collective over all ranks.

    The checkpoint appears whole, under its final name, or not at all. One of the same step is
    replaced. Later ones, from before the run went back, are set aside; see `layout`.

    Args:
        directory: Holds the run's checkpoints; on storage that all ranks share.
        step: Number of steps done.
        tensors: Each a DTensor or a `FlatSlice`, of which every rank writes its part, or a plain
            tensor that is the same on all ranks. A rank may leave out what others write; any shape
            and device.
        numbers: What JSON can hold. Rank 0's are written.
        keep: Number of latest checkpoints that stay, 1 or more.
        group: Whose collectives to use; None takes the default group.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: The same on all ranks, if any of them failed. What was there before is
            untouched.
    """
    goal = f"save {final_path(directory, step)}"
    _on_rank_0(goal, lambda: _begin(directory, step, numbers), group)
    index = _write_tensors(goal, writing_path(directory, step), tensors, group)
    _on_rank_0(goal, lambda: _finish(directory, step, index, keep), group)
    return final_path(directory, step)


def load(path: Path, tensors: dict[str, Tensor]) -> list[str]:
    """Read the checkpoint at `path` into `tensors`, in place. Collective over all ranks.

    Args:
        path: A checkpoint, at any world size and sharding when it was saved.
        tensors: Plain tensors and DTensors by name; same names on all ranks. Values are converted
            to their dtypes; that is logged, as it may lose precision.

    Returns:
        Sorted names of tensors in the checkpoint that were not asked for.

    Raises:
        CheckpointError: The same on all ranks, if the checkpoint is damaged, would run code, or
            lacks a tensor or has it in another shape. Nothing has been read in the last two cases.
    """
    goal = f"load {path}"
    index = _on_every_rank(goal, lambda: _fitting_index(path, tensors))
    with _one_error(goal), _quiet_alone():
        state_dict_loader.load(
            dict(tensors),
            storage_reader=IndexedReader(path, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
    return sorted(index.state_dict_metadata.keys() - tensors.keys())


def read_numbers(path: Path) -> dict[str, Any]:
    """Return the numbers in the checkpoint at `path`.

    Raises:
        CheckpointError: If they cannot be read or are of a later format than this version knows.
    """
    try:
        state = json.loads((path / NUMBERS_FILE).read_text())
        found_format, numbers = state["format"], state["numbers"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / NUMBERS_FILE} cannot be read: {error!r}") from error
    if found_format != FORMAT:
        raise CheckpointError(
            f"{path} has format {found_format!r}; this version of distmp reads {FORMAT}"
        )
    return numbers


def stored_tensors(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return global shape and dtype of every tensor in the checkpoint at `path`.

    Raises:
        CheckpointError: If its index cannot be used.
    """
    return _shapes(read_index(path))


def _begin(directory: Path, step: int, numbers: dict[str, Any]) -> None:
    text = json.dumps({"format": FORMAT, "step": step, "numbers": numbers}, indent=2)
    file = prepare(directory, step) / NUMBERS_FILE
    file.write_text(text + "\n")
    synchronize(file)


def _finish(directory: Path, step: int, index: Metadata, keep: int) -> None:
    check_files(writing_path(directory, step), index)
    publish(directory, step)
    tidy(directory, step, keep)


def _write_tensors(
    goal: str, path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> Metadata:
    with _one_error(goal), _quiet_alone():
        return state_dict_saver.save(
            dict(tensors),
            storage_writer=FileSystemWriter(path, sync_files=True),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )


def _fitting_index(path: Path, tensors: dict[str, Tensor]) -> Metadata:
    index = read_index(path)
    stored = _shapes(index)
    misfits = list(islice(_misfits(tensors, stored), LISTED + 1))
    if misfits:
        more = "; and more" if len(misfits) > LISTED else ""
        raise CheckpointError(f"it does not fit: {'; '.join(misfits[:LISTED])}{more}")
    _log_conversions(path, tensors, stored)
    return index


def _shapes(index: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)  # `read_index` allows nothing else
    }


def _misfits(
    tensors: dict[str, Tensor], stored: dict[str, tuple[torch.Size, torch.dtype]]
) -> Iterator[str]:
    for name, tensor in tensors.items():
        if name not in stored:
            yield f"there is no {name!r} in it"
        elif stored[name][0] != whole_shape(tensor):
            yield f"{name!r} has shape {[*stored[name][0]]} in it, not {[*whole_shape(tensor)]}"
        elif tensor.is_meta:
            yield f"{name!r} is to be loaded but has no memory (device 'meta')"


def _log_conversions(
    path: Path, tensors: dict[str, Tensor], stored: dict[str, tuple[torch.Size, torch.dtype]]
) -> None:
    changes = {(stored[name][1], tensor.dtype) for name, tensor in tensors.items()}
    changed = sorted(f"{old} to {new}" for old, new in changes if old != new)
    if changed and _rank() == 0:
        logger.warning("tensors of %s are converted from %s", path, ", ".join(changed))


# Agreement between ranks: what one rank cannot do, all of them raise.


def _on_rank_0(
    goal: str, work: Callable[[], object], group: dist.ProcessGroup | None = None
) -> None:
    _on_every_rank(goal, lambda: work() if _rank() == 0 else None, group)


def _on_every_rank(goal: str, work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `work` on every rank and return this rank's result."""
    cause: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  (raised below, together with the other ranks)
        cause = error
    problems = _gather(None if cause is None else _describe(cause), group)
    if any(problems):
        raise _failure(goal, problems) from cause
    return result


@contextmanager
def _one_error(goal: str) -> Iterator[None]:
    """Turn DCP's error, which it raises on all ranks and not as an `Exception`, into ours."""
    try:
        yield
    except CheckpointException as error:
        failures = error.failures
        problems = [
            _describe(failures[rank][0]) if rank in failures else None
            for rank in range(_world_size())
        ]
        raise _failure(goal, problems) from error


def _failure(goal: str, problems: list[str | None]) -> CheckpointError:
    """Return the error for one problem per rank (None: this rank had none)."""
    failed = [rank for rank, problem in enumerate(problems) if problem is not None]
    first = problems[failed[0]]
    if problems.count(first) == len(problems):
        return CheckpointError(f"cannot {goal}: {first}")
    others = f" (rank {failed[0]} is the first of {len(failed)})" if len(failed) > 1 else ""
    return CheckpointError(f"cannot {goal}: rank {failed[0]}: {first}{others}")


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _gather(problem: str | None, group: dist.ProcessGroup | None) -> list[str | None]:
    problems = [problem] * _world_size()
    if _distributed():
        dist.all_gather_object(problems, problem, group=group)
    return problems


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _world_size() -> int:
    return dist.get_world_size() if _distributed() else 1


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Silence DCP's warning that a run without a process group has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*uninitialized")
        yield
