"""Creates and removes checkpoints atomically.

The checkpoint of step 100 is the directory `step-000100`. It contains `state.json`, which is
written last. The directory is then renamed, which is atomic, so every reader sees a complete
checkpoint or none. Suffixes mark other directories:

- `.writing`: not finished; removed by the next save.
- `.replaced`: was current until another checkpoint of the same step was written. It is used while
  that one is missing, in case the machine stops between the two renames.
- `.removing`: is being deleted.
- `.abandoned`: belongs to the step just saved or a later one, from before the run returned to an
  earlier step. The newest are kept for the user, see `saving.tidy`; `--resume auto` ignores them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from distmp.checkpoint.manifest import STATE_FILE
from distmp.distributed.failing_together import Failure, Ranks
from distmp.errors import CheckpointError, require

# The index of the tensors, in the format of torch.distributed.checkpoint.
INDEX_FILE = ".metadata"

_NAME = re.compile(r"step-(\d{6,})(\.writing|\.replaced)?")
_STEP = re.compile(r"step-(\d{6,})")


class Entry(NamedTuple):
    """The directory of a checkpoint, finished or not.

    Attributes:
        step: Step in the name of the directory.
        path: The directory.
        finished: Whether the checkpoint was completed.
    """

    step: int
    path: Path
    finished: bool


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a directory with the files that every checkpoint has."""
    return (path / STATE_FILE).is_file() and (path / INDEX_FILE).is_file()


def is_superseded(path: Path) -> bool:
    """Return whether `path` was replaced by another checkpoint, which is complete."""
    return path.suffix == ".replaced" and is_checkpoint(path.with_suffix(""))


def final_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return directory / f"step-{step:06d}"


def named_step(path: Path) -> int | None:
    """Return the step in the name of a directory, with any suffix; None if the name has none."""
    name = _STEP.match(path.name)
    return int(name[1]) if name else None


def synchronize(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entries_of(directory: Path) -> list[Entry]:
    """Return the directories of checkpoints, finished or not, in order of preference."""
    order = {".writing": 0, None: 1, ".replaced": 2}
    entries = []
    for path in directory.glob("step-*"):
        if (name := _NAME.fullmatch(path.name)) and not _holds_checkpoints(path):
            entry = Entry(int(name[1]), path, finished=name[2] != ".writing")
            entries.append((-entry.step, order[name[2]], entry))
    return [entry for *_, entry in sorted(entries)]


def abandoned(directory: Path) -> list[Entry]:
    """Return the checkpoints that were set aside, the latest step first."""
    found = [
        Entry(step, path, finished=True)
        for path in directory.glob("step-*.abandoned")
        if (step := named_step(path)) is not None
    ]
    return sorted(found, reverse=True)


def prepare(directory: Path, step: int) -> Path:
    """Remove leftovers of a crash, and return the directory to write to."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("step-*"):
        if path.suffix in (".writing", ".removing") or is_superseded(path):
            with contextlib.suppress(OSError):  # NFS keeps files that are open
                _delete(path)
    writing = final_path(directory, step).with_suffix(".writing")
    writing.mkdir()
    return writing


def publish(written: Path) -> Path:
    """Make the checkpoint in a directory current; return the directory under its final name.

    Its files must be on the disk, `state.json` last.
    """
    final = written.with_suffix("")
    synchronize(written)
    if final.exists():
        final.rename(_vacate(final.with_suffix(".replaced")))
    written.rename(final)
    synchronize(final.parent)
    return final


def remove(path: Path) -> None:
    """Remove a checkpoint."""
    _delete(path.rename(_vacate(path.with_suffix(".removing"))))


def set_aside(path: Path) -> Path:
    """Mark a checkpoint as abandoned, and return its new path.

    Replaces one that an earlier branch of the run has set aside at the same step, even a permanent
    one: of each step, one checkpoint is kept besides the current one.
    """
    return path.rename(_vacate(path.with_suffix(".abandoned")))


def _holds_checkpoints(path: Path) -> bool:
    """Return whether a directory with the name of a checkpoint is a directory of checkpoints.

    A loop that saves to `runs/step-000100` gets `runs/step-000100/step-000100`.
    """
    if (path / STATE_FILE).exists() or not path.is_dir():
        return False
    return any(_STEP.match(inner.name) and inner.is_dir() for inner in path.iterdir())


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _vacate(path: Path) -> Path:
    """Remove what is at `path`, if anything; return `path`."""
    if path.exists():
        _delete(path)
    return path


def locate(setting: str, text: str) -> Path:
    """Return the path that a setting names.

    Args:
        setting: Dotted name of the setting.
        text: Its value.

    Raises:
        ConfigError: If it is a URL.
    """
    problem = "is a URL; name a directory on a file system that renames directories atomically"
    require("://" not in text, setting, text, problem)
    return Path(text)


T = TypeVar("T")


def all_or_checkpoint_error(ranks: Ranks, goal: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's result.

    Args:
        ranks: The ranks.
        goal: Completes the message "cannot <goal>: ...".
        work: A function without collectives.

    Raises:
        CheckpointError: On every rank, if `work` raised an exception on any of them.
    """
    return ranks.all_or_none(work, catch=Exception, error=partial(checkpoint_error, goal))


def rank_0_or_checkpoint_error(ranks: Ranks, goal: str, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank, see `all_or_checkpoint_error`."""
    return ranks.from_rank_0(work, catch=Exception, error=partial(checkpoint_error, goal))


def checkpoint_error(goal: str, failures: dict[int, Failure], world_size: int) -> CheckpointError:
    """Return the error "cannot <goal>: ..." for the failures of some ranks."""
    first, failure = min(failures.items())
    messages = {failure.message for failure in failures.values()}
    if len(failures) == world_size and len(messages) == 1:
        return CheckpointError(f"cannot {goal}: {failure.message}")
    others = f" (rank {first} is the first of {len(failures)})" if len(failures) > 1 else ""
    return CheckpointError(f"cannot {goal}: rank {first}: {failure.message}{others}")
