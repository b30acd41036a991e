"""Where checkpoints lie in a directory, and how one appears and disappears as a whole.

A checkpoint of step 100 is the directory `step-000100`. Endings mark what is not one:

- `.writing`: not finished; removed by the next save.
- `.replaced`: was current until another checkpoint of the same step came; stands in for it while
  that one is missing, in case the machine stops between the two renames.
- `.removing`: being deleted.
- `.abandoned`: of a later step than the one just saved, from before the run went back; kept for
  the user, but never resumed from by itself.

A rename within one directory is atomic, so every reader sees a whole checkpoint or none.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from distmp.errors import ConfigError

# Tensors' index, in the format of torch.distributed.checkpoint, and our own numbers.
INDEX_FILE = ".metadata"
NUMBERS_FILE = "state.json"

_NAME = re.compile(r"step-(\d{6,})(\.replaced)?")

logger = logging.getLogger("distmp")


def latest(directory: Path) -> Path | None:
    """Return the checkpoint of the highest step in `directory`, or None if there is none."""
    found = checkpoints(directory)
    return found[max(found)] if found else None


def resolve(resume: str, directory: Path) -> Path | None:
    """Return the checkpoint that setting `resume` means.

    Args:
        resume: "auto", the path of a checkpoint, or the path of a directory of checkpoints (the
            latest of them is taken).
        directory: Directory of this run's checkpoints, for "auto".

    Returns:
        The checkpoint; None only for "auto" where there is none yet.

    Raises:
        ConfigError: If the path holds no checkpoint.
    """
    if resume == "auto":
        return latest(directory)
    path = Path(resume)
    found = path if is_checkpoint(path) else latest(path)
    if found is None:
        problem = "is no checkpoint and holds none" if path.exists() else "does not exist"
        raise ConfigError("resume", resume, f"{path.absolute()} {problem}")
    return found


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a directory with the files that every checkpoint has."""
    return (path / INDEX_FILE).is_file() and (path / NUMBERS_FILE).is_file()


def checkpoints(directory: Path) -> dict[int, Path]:
    """Return the whole checkpoints in `directory` by step, in ascending order."""
    found: dict[int, Path] = {}
    # In reverse, so that `step-000100` comes after, and wins over, `step-000100.replaced`.
    for path in sorted(directory.glob("step-*"), reverse=True):
        name = _NAME.fullmatch(path.name)
        if name and is_checkpoint(path):
            found[int(name[1])] = path
    return dict(sorted(found.items()))


def final_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies once it is whole."""
    return directory / f"step-{step:06d}"


def writing_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is written before it is whole."""
    return final_path(directory, step).with_suffix(".writing")


def prepare(directory: Path, step: int) -> Path:
    """Remove what a crash has left behind and make the directory to write to."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("step-*"):
        replaced = path.suffix == ".replaced" and is_checkpoint(path.with_suffix(""))
        if path.suffix in (".writing", ".removing") or replaced:
            shutil.rmtree(path)
    writing = writing_path(directory, step)
    writing.mkdir()
    return writing


def publish(directory: Path, step: int) -> None:
    """Make the written checkpoint of `step` current, by one rename.

    Its files must have reached the disk; the directories are synchronised here.
    """
    writing, final = writing_path(directory, step), final_path(directory, step)
    synchronize(writing)
    if final.exists():
        final.rename(_clear(final.with_suffix(".replaced")))
    writing.rename(final)
    synchronize(directory)


def tidy(directory: Path, step: int, keep: int) -> None:
    """Leave the `keep` latest checkpoints up to `step`, and set later ones aside.

    What cannot be removed is logged: the new checkpoint is good all the same.
    """
    try:
        for path in directory.glob("step-*.replaced"):
            _remove(path)
        found = checkpoints(directory)
        for later in [s for s in found if s > step]:
            _abandon(found.pop(later), step)
        for path in list(found.values())[:-keep]:
            _remove(path)
    except OSError as error:
        logger.warning("cannot tidy up old checkpoints in %s: %s", directory, error)


def synchronize(path: Path) -> None:
    """Wait until a file, or the names in a directory, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _abandon(path: Path, step: int) -> None:
    aside = path.rename(_clear(path.with_suffix(".abandoned")))
    logger.warning("the run went back to step %d: %s is now %s", step, path, aside.name)


def _remove(path: Path) -> None:
    shutil.rmtree(path.rename(_clear(path.with_suffix(".removing"))))


def _clear(path: Path) -> Path:
    """Make sure that nothing is at `path`."""
    if path.exists():
        shutil.rmtree(path)
    return path
