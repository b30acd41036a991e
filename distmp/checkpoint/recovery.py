"""Which checkpoint a run goes on from: the newest that is not damaged, the same on all ranks."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch.distributed as dist

from distmp.checkpoint import manifest
from distmp.checkpoint.index import read_index
from distmp.checkpoint.location import Location, locate
from distmp.checkpoint.manifest import STATE_FILE
from distmp.checkpoint.storage import INDEX_FILE, named_step, storage
from distmp.distributed.ranks import Ranks, describe
from distmp.errors import CheckpointError, ConfigError

logger = logging.getLogger("distmp")


class Usable(NamedTuple):
    """What `usable` has found.

    Attributes:
        path: The newest checkpoint that is not damaged, or None if there is none.
        damaged: What is wrong with each newer one.
        unfinished: A message for each newer one that was never finished.
    """

    path: Location | None
    damaged: list[str]
    unfinished: list[str]


def usable(
    directory: Location,
    *,
    before: int | None = None,
    other_than: Location | None = None,
    group: dist.ProcessGroup | None = None,
) -> Usable:
    """Find the newest checkpoint in `directory` that is not damaged. Collective over all ranks.

    Args:
        directory: The same on all ranks; rank 0 looks what is in it.
        before: Only checkpoints of earlier steps count.
        other_than: A checkpoint not to be looked at.
        group: All ranks; carries the collectives. None: the default group.

    Returns:
        The same on all ranks; the checkpoint has been compared with its checksums.

    Raises:
        CheckpointError: On all ranks, if the directory cannot be looked at.
    """
    ranks = Ranks(group)
    entries = ranks.on_rank_0(
        f"look for checkpoints in {directory}",
        lambda: [
            (entry.path.name, entry.finished)
            for entry in storage(directory).entries()
            if before is None or entry.step < before
        ],
    )
    found = Usable(None, [], [])
    for name, finished in entries:
        path = directory / name
        if path == other_than:
            continue
        if not finished:
            found.unfinished.append(f"{path} was never finished")
            continue
        try:
            verify(path, group=group)
        except CheckpointError as error:
            found.damaged.append(str(error))
        else:
            return found._replace(path=path)
    return found


def verify(path: Location, *, group: dist.ProcessGroup | None = None) -> None:
    """Compare the files of a checkpoint with their checksums. Collective over all ranks.

    Each file is read once, by one of the ranks. One without checksums, of the first version of
    distmp, has its index checked.

    Raises:
        CheckpointError: The same on all ranks, if it is damaged or of a later format.
    """
    ranks = Ranks(group)
    problem, crc32 = None, None
    try:
        crc32 = _check_share(path, ranks)
    except Exception as error:  # noqa: BLE001  (raised below, on all ranks together)
        problem = describe(error)
    results = ranks.gather((problem, crc32))
    problems = sorted({problem for problem, _ in results if problem is not None})
    if problems:
        raise CheckpointError(f"{path} cannot be used: {'; '.join(problems)}")
    if any(other != crc32 for _, other in results):
        raise CheckpointError(
            f"{path} is not the same on all ranks (all hosts must read the same, shared storage)"
        )


def resolve(
    resume: str,
    directory: Location,
    *,
    group: dist.ProcessGroup | None = None,
    setting: str = "resume",
) -> Location | None:
    """Return the checkpoint that setting `resume` means. Collective over all ranks.

    Rank 0 logs what is wrong with newer ones.

    Args:
        resume: "auto", a checkpoint, or a directory of checkpoints, of which the newest that is
            not damaged is taken; a path, or a URL for fsspec.
        directory: Directory of this run's checkpoints, for "auto".
        group: All ranks; carries the collectives. None: the default group.
        setting: How errors call the setting.

    Returns:
        The checkpoint, compared with its checksums; None only for "auto" where there is none yet.

    Raises:
        ConfigError: If the path holds no checkpoint.
        CheckpointError: If the named checkpoint is damaged, or all of those in the directory.
    """
    ranks = Ranks(group)
    if resume != "auto":
        directory = locate(setting, resume)
    goal = f"look for checkpoints in {directory}"
    exists, is_one = ranks.on_rank_0(
        goal, lambda: (directory.exists(), resume != "auto" and _means_one(directory))
    )
    if is_one:
        _verify_named(directory, group)
        return directory
    found = usable(directory, group=group)
    if found.path is None and found.damaged:
        raise CheckpointError(
            f"no checkpoint in {directory} can be used: {'; '.join(found.damaged)}"
        )
    if found.path is None and resume != "auto":
        problem = "is no checkpoint and holds none" if exists else "does not exist"
        raise ConfigError(setting, resume, f"{directory.absolute()} {problem}")
    if ranks.rank == 0:
        for report in found.damaged + found.unfinished:
            logger.warning("%s; going on from %s", report, found.path or "the beginning")
    return found.path


def _verify_named(path: Location, group: dist.ProcessGroup | None) -> None:
    """Verify a checkpoint that somebody has named, and name another one if it is damaged."""
    try:
        verify(path, group=group)
    except CheckpointError as error:
        other = usable(path.parent, other_than=path, group=group).path
        hint = f"{other} is whole" if other is not None else "there is no other one beside it"
        raise CheckpointError(f"{error}; {hint}") from error


def _means_one(path: Location) -> bool:
    """Whether a path means a checkpoint, whatever has become of it, and not a directory of them."""
    if not path.exists():
        return False
    if named_step(path) is not None:
        return True
    return (path / STATE_FILE).exists() or (path / INDEX_FILE).exists()


def _check_share(path: Location, ranks: Ranks) -> int:
    """Check the files that fall to this rank; return the checksum of the list of them."""
    state = manifest.read(path)
    step = named_step(path)
    if step not in (None, state.step):
        raise CheckpointError(f"it is named after step {step}, and holds step {state.step}")
    if state.files is None:
        read_index(path)
        if ranks.rank == 0:
            logger.warning("%s has no checksums; an earlier version of distmp wrote it", path)
        return state.crc32
    # In the order of the ranks that wrote them, which may have them still in memory.
    for name in list(state.files)[ranks.rank :: ranks.world_size]:
        manifest.check_file(path / name, state.files[name])
    return state.crc32
