"""Saving and loading checkpoints: tensors, sharded or not, and a few numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from distmp.checkpoint import dcp, manifest
from distmp.checkpoint.index import read_index
from distmp.checkpoint.layout import final_path, latest, tidy
from distmp.checkpoint.location import Location, RemotePath, check_reachable
from distmp.checkpoint.manifest import STATE_FILE, FileSum
from distmp.checkpoint.recovery import Usable, resolve, usable, verify
from distmp.checkpoint.retention import Retention
from distmp.checkpoint.storage import INDEX_FILE, storage, synchronize
from distmp.distributed.ranks import Ranks
from distmp.errors import CheckpointError
from distmp.utils.flat_shard import whole_shape

__all__ = [
    "Location",
    "Ranks",
    "Retention",
    "Usable",
    "check_reachable",
    "latest",
    "load",
    "read_numbers",
    "resolve",
    "save",
    "stored_tensors",
    "usable",
    "verify",
]

# How many tensors that do not fit an error names.
LISTED = 5

logger = logging.getLogger("distmp")


def save(
    directory: Location,
    step: int,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    keep: int | Retention,
    *,
    group: dist.ProcessGroup | None = None,
) -> Location:
    """Write the checkpoint of `step` and make it the latest. Collective over all ranks.

    The checkpoint appears whole, under its final name, or not at all. One of the same step is
    replaced. Later ones, from before the run went back, are set aside; see `storage`.

    May run in a thread of its own, if nothing else uses `group` meanwhile.

    Args:
        directory: Holds the run's checkpoints; on storage that all ranks share.
        step: Number of steps done.
        tensors: Each a DTensor or a `FlatShard`, of which every rank writes its part, or a plain
            tensor that is the same on all ranks. A rank may leave out what others write; any shape
            and device.
        numbers: What JSON can hold. Rank 0's are written.
        keep: Which checkpoints stay; a number of latest ones, 1 or more, or all the rules.
        group: All ranks; carries the collectives. None: the default group.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: The same on all ranks, if any of them failed. What was there before is
            untouched.
    """
    retention = Retention(keep) if isinstance(keep, int) else keep
    ranks = Ranks(group)
    goal = f"save {final_path(directory, step)}"
    # Its name and not its path: how to reach a file system cannot always be sent.
    writing = directory / ranks.on_rank_0(goal, lambda: _begin(directory, step, numbers))
    written = ranks.gather(dcp.write(goal, writing, tensors, ranks))
    files = {name: file for sums in written for name, file in sums.items()}
    files[INDEX_FILE] = files.pop(INDEX_FILE)  # behind the data, of which each rank has one

    def finish() -> str:
        final = _finish(directory, writing, manifest.encode(step, numbers, files), files)
        tidy(directory, step, retention)
        return final.name

    return directory / ranks.on_rank_0(goal, finish)


def load(
    path: Location,
    tensors: dict[str, Tensor],
    *,
    verified: bool = False,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Read the checkpoint at `path` into `tensors`, in place. Collective over all ranks.

    Args:
        path: A checkpoint, at any world size and sharding when it was saved.
        tensors: Plain tensors and DTensors by name; same names on all ranks. Values are converted
            to their dtypes; that is logged, as it may lose precision.
        verified: The path comes from `usable` or `resolve` just now, which have compared its files
            with their checksums; otherwise that is done first.
        group: All ranks; carries the collectives. None: the default group.

    Returns:
        Sorted names of tensors in the checkpoint that were not asked for.

    Raises:
        CheckpointError: The same on all ranks, if the checkpoint is damaged, would run code, or
            lacks a tensor or has it in another shape. Nothing has been read in these cases.
    """
    ranks = Ranks(group)
    goal = f"load {path}"
    if not verified:
        verify(path, group=group)
    index = ranks.on_every_rank(goal, lambda: _fitting_index(path, tensors, ranks))
    dcp.read(goal, path, index, tensors, ranks)
    return sorted(index.state_dict_metadata.keys() - tensors.keys())


def read_numbers(path: Location) -> dict[str, Any]:
    """Return the numbers in the checkpoint at `path`.

    Raises:
        CheckpointError: If they cannot be read or are of a later format than this version knows.
    """
    return manifest.read(path).numbers


def stored_tensors(path: Location) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return global shape and dtype of every tensor in the checkpoint at `path`.

    Raises:
        CheckpointError: If its index cannot be used.
    """
    return _shapes(read_index(path))


def _begin(directory: Location, step: int, numbers: dict[str, Any]) -> str:
    manifest.encode(step, numbers, {})  # before anything is written
    return storage(directory).prepare(step).name


def _finish(
    directory: Location, writing: Location, state: bytes, files: dict[str, FileSum]
) -> Location:
    for name, written in files.items():
        try:
            manifest.check_size(writing / name, written)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} (all hosts must write to the same, shared storage)"
            ) from error
    file = writing / STATE_FILE
    file.write_bytes(state)
    if not isinstance(file, RemotePath):
        synchronize(file)
    return storage(directory).publish(writing)


def _fitting_index(path: Location, tensors: dict[str, Tensor], ranks: Ranks) -> Metadata:
    index = read_index(path)
    stored = _shapes(index)
    misfits = list(islice(_misfits(tensors, stored), LISTED + 1))
    if misfits:
        more = "; and more" if len(misfits) > LISTED else ""
        raise CheckpointError(f"it does not fit: {'; '.join(misfits[:LISTED])}{more}")
    _log_conversions(path, tensors, stored, ranks)
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
    path: Location,
    tensors: dict[str, Tensor],
    stored: dict[str, tuple[torch.Size, torch.dtype]],
    ranks: Ranks,
) -> None:
    changes = {(stored[name][1], tensor.dtype) for name, tensor in tensors.items()}
    changed = sorted(f"{old} to {new}" for old, new in changes if old != new)
    if changed and ranks.rank == 0:
        logger.warning("tensors of %s are converted from %s", path, ", ".join(changed))
