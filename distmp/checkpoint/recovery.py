"""Selects the checkpoint to continue from: the newest healthy one, the same on all ranks.

Healthy: undamaged, and not marked as unhealthy when it was saved (see `store.save`).
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import NamedTuple

from distmp.checkpoint import manifest
from distmp.checkpoint.location import Location, locate
from distmp.checkpoint.manifest import STATE_FILE
from distmp.checkpoint.rank_failures import rank_0_or_checkpoint_error
from distmp.checkpoint.storage import INDEX_FILE, named_step, storage
from distmp.checkpoint.stored import StoredCheckpoint
from distmp.distributed.ranks import Ranks
from distmp.errors import CheckpointError, ConfigError

logger = logging.getLogger("distmp")


class Usable(NamedTuple):
    """The result of `usable`.

    Attributes:
        checkpoint: The newest healthy checkpoint, verified; None if there is none.
        damaged: A message for each newer checkpoint that is damaged.
        unfinished: A message for each newer checkpoint that was not finished.
        unhealthy: A message for each newer checkpoint that is marked as unhealthy.
    """

    checkpoint: StoredCheckpoint | None
    damaged: list[str]
    unfinished: list[str]
    unhealthy: list[str]


def usable(
    directory: Location, *, before: int | None = None, other_than: Location | None = None
) -> Usable:
    """Find the newest healthy checkpoint in `directory`. Collective over all ranks.

    Args:
        directory: The same on all ranks; rank 0 lists it.
        before: Consider only checkpoints of earlier steps than this one.
        other_than: Ignore this checkpoint.

    Returns:
        The same result on all ranks.

    Raises:
        CheckpointError: On all ranks, if the directory cannot be listed.
    """
    ranks, goal = Ranks(None), f"look for checkpoints in {directory}"
    entries = rank_0_or_checkpoint_error(
        ranks,
        goal,
        lambda: [
            (entry.path.name, entry.finished)
            for entry in storage(directory).entries()
            if before is None or entry.step < before
        ],
    )
    result = Usable(None, [], [], [])
    for name, finished in entries:
        path = directory / name
        if path == other_than:
            continue
        if not finished:
            result.unfinished.append(f"{path} was not finished")
            continue
        checkpoint = StoredCheckpoint(path)
        # Read before the data files, which may be large.
        if mark := rank_0_or_checkpoint_error(ranks, goal, partial(_mark, checkpoint)):
            result.unhealthy.append(mark)
            continue
        try:
            checkpoint.verify()
        except CheckpointError as error:
            result.damaged.append(str(error))
        else:
            return result._replace(checkpoint=checkpoint)
    return result


def resolve(
    resume: str, directory: Location, *, setting: str = "resume"
) -> StoredCheckpoint | None:
    """Return the checkpoint that the setting `resume` refers to. Collective over all ranks.

    Rank 0 logs newer checkpoints that are damaged, unfinished or unhealthy. An unhealthy checkpoint
    that is named by its path is used, with a warning.

    Args:
        resume: "auto", or the path or fsspec URL of a checkpoint or of a directory of checkpoints.
            In a directory the newest healthy checkpoint is used.
        directory: Directory of this run's checkpoints, for "auto".
        setting: Name of the setting, for errors.

    Returns:
        The checkpoint, verified; None only for "auto" where there is no checkpoint yet.

    Raises:
        ConfigError: If the path holds no checkpoint.
        CheckpointError: If the named checkpoint is damaged, or all of those in the directory are
            damaged or unhealthy.
    """
    ranks = Ranks(None)
    if resume != "auto":
        directory = locate(setting, resume)
    exists, is_checkpoint = rank_0_or_checkpoint_error(
        ranks,
        f"look for checkpoints in {directory}",
        lambda: (directory.exists(), resume != "auto" and _names_checkpoint(directory)),
    )
    if is_checkpoint:
        checkpoint = _verify_named(directory)
        if checkpoint.state.unhealthy is not None and ranks.rank == 0:
            logger.warning("%s; it is used because it was named", _unhealthy(checkpoint))
        return checkpoint
    result = usable(directory)
    unusable = result.damaged + result.unhealthy
    if result.checkpoint is None and unusable:
        hint = "; name an unhealthy one by its path to use it anyway" if result.unhealthy else ""
        raise CheckpointError(
            f"no checkpoint in {directory} can be used: {'; '.join(unusable)}{hint}"
        )
    if result.checkpoint is None and resume != "auto":
        problem = "is not a checkpoint and contains none" if exists else "does not exist"
        raise ConfigError(setting, resume, f"{directory.absolute()} {problem}")
    if ranks.rank == 0:
        for message in unusable + result.unfinished:
            logger.warning("%s; continuing from %s", message, result.checkpoint or "the beginning")
    return result.checkpoint


def newest_healthy(directory: Location) -> Location | None:
    """Return the newest checkpoint that is not marked as unhealthy, without verifying its files."""
    for entry in storage(directory).entries():
        with contextlib.suppress(CheckpointError):
            if entry.finished and manifest.read(entry.path).unhealthy is None:
                return entry.path
    return None


def _mark(checkpoint: StoredCheckpoint) -> str | None:
    """Return a message if a checkpoint is marked as unhealthy; None also if it is damaged."""
    try:
        return None if checkpoint.state.unhealthy is None else _unhealthy(checkpoint)
    except CheckpointError:
        return None


def _unhealthy(checkpoint: StoredCheckpoint) -> str:
    return f"{checkpoint} is marked as unhealthy: {checkpoint.state.unhealthy}"


def _verify_named(path: Location) -> StoredCheckpoint:
    """Verify a checkpoint that the user named; if it is damaged, the error suggests another one."""
    checkpoint = StoredCheckpoint(path)
    try:
        checkpoint.verify()
    except CheckpointError as error:
        other = usable(path.parent, other_than=path).checkpoint
        hint = f"{other} is intact" if other is not None else "its directory has no other one"
        raise CheckpointError(f"{error}; {hint}") from error
    return checkpoint


def _names_checkpoint(path: Location) -> bool:
    """Whether a path names a checkpoint, damaged or not, and not a directory of checkpoints."""
    if not path.exists():
        return False
    if named_step(path) is not None:
        return True
    return (path / STATE_FILE).exists() or (path / INDEX_FILE).exists()
