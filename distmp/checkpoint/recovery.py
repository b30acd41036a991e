"""Selects the checkpoint to continue from: the newest healthy one, the same on all ranks.

Healthy: undamaged, not marked as unhealthy when it was saved (see `saving.save`), and not with the
same weights as a later checkpoint that is marked. If steps were skipped before a checkpoint was
marked, earlier checkpoints since the last applied update hold the same weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from distmp.checkpoint import storage
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.manifest import STATE_FILE, State, readable_state
from distmp.distributed.failing_together import Ranks
from distmp.errors import CheckpointError, ConfigError, did_you_mean
from distmp.utils.settings import flat
from distmp.utils.settings.yaml_files import read_yaml

logger = logging.getLogger("distmp")

_RESTORE = "restore it from a copy, or start again without it"


class Usable(NamedTuple):
    """The result of `usable`.

    Attributes:
        checkpoint: The newest healthy checkpoint, verified; None if there is none.
        damaged: A message for each newer checkpoint that is damaged.
        unfinished: A message for each newer checkpoint that was not finished.
        unhealthy: A message for each newer checkpoint that is unhealthy.
    """

    checkpoint: StoredCheckpoint | None
    damaged: list[str]
    unfinished: list[str]
    unhealthy: list[str]


def usable(directory: Path, *, before: int | None = None) -> Usable:
    """Find the newest healthy checkpoint in `directory`. Collective over all ranks.

    Args:
        directory: The same on all ranks; rank 0 lists it.
        before: Consider only checkpoints of earlier steps than this one.

    Returns:
        The same result on all ranks.

    Raises:
        CheckpointError: On all ranks, if the directory cannot be listed.
    """
    entries = storage.rank_0_or_checkpoint_error(
        Ranks(None),
        f"look for checkpoints in {directory}",
        lambda: [
            (entry.path.name, entry.finished, problem)
            for entry, problem in _examined(directory, before)
        ],
    )
    result = Usable(None, [], [], [])
    for name, finished, problem in entries:
        path = directory / name
        if not finished:
            result.unfinished.append(f"{path} was not finished")
        elif problem is not None:
            result.unhealthy.append(f"{path} {problem}")
        else:
            checkpoint = StoredCheckpoint(path)
            try:
                checkpoint.verify()
            except CheckpointError as error:
                result.damaged.append(str(error))
            else:
                return result._replace(checkpoint=checkpoint)
    return result


def resolve(
    resume: str, directory: Path, *, setting: str = "resume", missing_ok: bool = False
) -> StoredCheckpoint | None:
    """Return the checkpoint that the setting `resume` refers to. Collective over all ranks.

    Rank 0 logs newer checkpoints that are damaged, unfinished or unhealthy. An unhealthy checkpoint
    that is named by its path is used, with a warning.

    Args:
        resume: "auto", or the path of a checkpoint or of a directory of checkpoints.
            In a directory, or in that of its checkpoints if it is the directory of a run, the
            newest healthy checkpoint is used.
        directory: Directory of this run's checkpoints, for "auto".
        setting: Name of the setting, for errors. Only `resume` has the value "auto".
        missing_ok: Whether a path without a checkpoint is no error, unless it is a file.

    Returns:
        The checkpoint, verified; None only for "auto" or with `missing_ok`, if there is none yet.

    Raises:
        ConfigError: If the path holds no checkpoint.
        CheckpointError: If the named checkpoint is damaged, or all of those in the directory are
            damaged or unhealthy.
    """
    ranks = Ranks(None)
    is_path = setting != "resume" or resume != "auto"
    if is_path:
        directory = storage.locate(setting, resume)
    exists, is_file, is_checkpoint, holding = storage.rank_0_or_checkpoint_error(
        ranks,
        f"look for checkpoints in {directory}",
        lambda: (
            directory.exists(),
            directory.is_file(),
            is_path and _names_checkpoint(directory),
            _holding(directory) if is_path else directory,
        ),
    )
    if is_checkpoint:
        checkpoint = StoredCheckpoint(directory)
        checkpoint.verify()
        goal = f"look for marks of {checkpoint}"
        problem = storage.rank_0_or_checkpoint_error(ranks, goal, lambda: _problem_of(directory))
        if problem is not None and ranks.rank == 0:
            logger.warning("%s %s; it is used because it was named", checkpoint, problem)
        return checkpoint
    directory = holding
    result = usable(directory)
    unusable = result.damaged + result.unhealthy
    if result.checkpoint is None and unusable:
        named = (
            "start again, for example with a lower learning rate, or name an unhealthy one by its "
            "path to use it anyway"
        )
        hint = named if result.unhealthy else _RESTORE
        raise CheckpointError(
            f"no checkpoint in {directory} can be used: {'; '.join(unusable)}; {hint}"
        )
    if result.checkpoint is None and is_path and (is_file or not missing_ok):
        problem = "is not a checkpoint and contains none" if exists else "does not exist"
        if setting == "resume":
            problem += f"; {did_you_mean(resume, ['auto']) or 'use auto to start a new run'}"
        raise ConfigError(setting, resume, f"{directory.absolute()} {problem}")
    if ranks.rank == 0:
        for message in unusable + result.unfinished:
            logger.warning("%s; continuing from %s", message, result.checkpoint or "the beginning")
    return result.checkpoint


def _holding(directory: Path) -> Path:
    """Return the directory of the checkpoints of a run; any other directory as it is."""
    inside, config = directory / "checkpoints", directory / "config.yaml"
    if storage.entries_of(directory) or not (inside.is_dir() or config.is_file()):
        return directory
    try:
        elsewhere = None if inside.is_dir() else flat(read_yaml(config)).get("checkpoint.path")
    except ConfigError:  # of another program
        return directory
    # A run keeps the name of a link; another link may lead to its directory.
    names = Path(os.path.abspath(directory)).name, directory.resolve().name
    places = [Path(elsewhere) / name for name in names] if elsewhere else [inside]
    return next(filter(Path.is_dir, places), places[0])


def newest_healthy(directory: Path) -> Path | None:
    """Return the newest healthy checkpoint, without verifying its data files."""
    healthy = (entry for entry, problem in _examined(directory) if problem is None)
    found = (each.path for each in healthy if each.finished and readable_state(each.path))
    return next(found, None)


def _problem_of(path: Path) -> str | None:
    """Return why a checkpoint that a path names is unhealthy."""
    for entry, problem in _examined(path.parent):
        if entry.path == path:
            return problem
    state = readable_state(path)  # it has another name
    return None if state is None else _marked(state)


def _examined(
    directory: Path, before: int | None = None
) -> Iterator[tuple[storage.Entry, str | None]]:
    """Yield the directories of checkpoints, the latest first, and why one is unhealthy.

    Args:
        directory: The directory.
        before: Consider only checkpoints of earlier steps than this one.
    """
    newer: tuple[Path, State] | None = None  # the next newer checkpoint that is marked
    for entry in storage.entries_of(directory):
        if before is not None and entry.step >= before:
            continue
        state = readable_state(entry.path) if entry.finished else None
        problem = None
        if state is not None and state.health.problem is not None:
            newer, problem = (entry.path, state), _marked(state)
        elif state is not None and newer is not None and state.step >= newer[1].updated_at:
            problem = f"holds the same weights as {newer[0]}, which {_marked(newer[1])}"
        yield entry, problem


def _marked(state: State) -> str | None:
    problem = state.health.problem
    return None if problem is None else f"is marked as unhealthy: {problem}"


def _names_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint, damaged or not, and not a directory of checkpoints."""
    if not path.exists():
        return False
    if (path / STATE_FILE).exists() or (path / storage.INDEX_FILE).exists():
        return True
    return storage.named_step(path) is not None and not storage.entries_of(path)
