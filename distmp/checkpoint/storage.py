"""Creates and removes checkpoints atomically, on a disk and on an object store.

The checkpoint of step 100 is the folder `step-000100`. It contains `state.json`, which is written
last. On a disk a folder is renamed, which is atomic, so every reader sees a complete checkpoint or
none. Suffixes mark other folders:

- `.writing`: not finished; removed by the next save.
- `.replaced`: was current until another checkpoint of the same step was written. It is used while
  that one is missing, in case the machine stops between the two renames.
- `.removing`: is being deleted.
- `.abandoned`: belongs to a later step than the one just saved, from before the run went back. The
  newest are kept for the user, see `layout.tidy`; `--resume auto` ignores them.

An object store cannot rename a folder. There a folder is a checkpoint as soon as it contains
`state.json`, and that file is removed first. A second checkpoint of the same step is written to
`step-000100.2` and so on; the highest number counts. An abandoned one gets a file `abandoned`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from distmp.checkpoint.location import Location, RemotePath
from distmp.checkpoint.manifest import STATE_FILE

# The index of the tensors, in the format of torch.distributed.checkpoint.
INDEX_FILE = ".metadata"

_LOCAL_NAME = re.compile(r"step-(\d{6,})(\.writing|\.replaced)?")
_REMOTE_NAME = re.compile(r"step-(\d{6,})(?:\.(\d+))?")
_ABANDONED_FILE = "abandoned"


class Entry(NamedTuple):
    """The folder of a checkpoint, finished or not.

    Attributes:
        step: Step in the name of the folder.
        path: The folder.
        finished: Whether the checkpoint was completed.
    """

    step: int
    path: Location
    finished: bool


def storage(directory: Location) -> Any:
    """Return the `LocalStorage` or `RemoteStorage` of the checkpoints in a directory."""
    if isinstance(directory, RemotePath):
        return RemoteStorage(directory)
    return LocalStorage(directory)


def is_checkpoint(path: Location) -> bool:
    """Return whether `path` is a directory with the files that every checkpoint has."""
    return (path / STATE_FILE).is_file() and (path / INDEX_FILE).is_file()


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint of `step`."""
    return f"step-{step:06d}"


def named_step(path: Location) -> int | None:
    """Return the step in the name of a folder, with any suffix; None if the name has none."""
    name = _REMOTE_NAME.match(path.name)
    return int(name[1]) if name else None


def synchronize(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalStorage:
    """Checkpoints on a disk, or on a network file system that renames atomically.

    Args:
        directory: Directory of the checkpoints; it need not exist yet.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def entries(self) -> list[Entry]:
        """Return the folders of checkpoints, finished or not, in order of preference."""
        order = {".writing": 0, None: 1, ".replaced": 2}
        entries = []
        for path in self._directory.glob("step-*"):
            if (name := _LOCAL_NAME.fullmatch(path.name)) and not _holds_checkpoints(path):
                entry = Entry(int(name[1]), path, finished=name[2] != ".writing")
                entries.append((-entry.step, order[name[2]], entry))
        return [entry for *_, entry in sorted(entries)]

    def abandoned(self) -> list[Entry]:
        """Return the checkpoints that were set aside, the latest step first."""
        found = [
            Entry(step, path, finished=True)
            for path in self._directory.glob("step-*.abandoned")
            if (step := named_step(path)) is not None
        ]
        return sorted(found, reverse=True)

    def prepare(self, step: int) -> Path:
        """Remove leftovers of a crash, and return the folder to write to."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.glob("step-*"):
            replaced = path.suffix == ".replaced" and is_checkpoint(path.with_suffix(""))
            if path.suffix in (".writing", ".removing") or replaced:
                _delete(path)
        writing = self._directory / f"{folder_name(step)}.writing"
        writing.mkdir()
        return writing

    def discard(self, path: Path) -> None:
        """Remove a checkpoint that was not finished."""
        _delete(path)

    def publish(self, written: Path) -> Path:
        """Make the checkpoint in a folder current; return the folder under its final name.

        Its files must be on the disk, `state.json` last.
        """
        final = written.with_suffix("")
        synchronize(written)
        if final.exists():
            final.rename(_vacate(final.with_suffix(".replaced")))
        written.rename(final)
        synchronize(self._directory)
        return final

    def clean(self) -> None:
        """Remove checkpoints that were replaced by another one of the same step."""
        for path in self._directory.glob("step-*.replaced"):
            self.remove(path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint."""
        _delete(path.rename(_vacate(path.with_suffix(".removing"))))

    def set_aside(self, path: Path) -> Path:
        """Mark a checkpoint as abandoned; return its new path."""
        return path.rename(_vacate(path.with_suffix(".abandoned")))


class RemoteStorage:
    """Checkpoints on any file system of fsspec.

    Args:
        directory: Directory of the checkpoints; it need not exist yet.
    """

    def __init__(self, directory: RemotePath) -> None:
        self._directory = directory

    def entries(self) -> list[Entry]:
        """Return the folders of checkpoints, finished or not, in order of preference."""
        entries = [
            (-step, -attempt, Entry(step, path, finished=(path / STATE_FILE).is_file()))
            for step, attempt, path in self._folders()
            if not (path / _ABANDONED_FILE).exists()
        ]
        return [entry for *_, entry in sorted(entries)]

    def abandoned(self) -> list[Entry]:
        """Return the checkpoints that were set aside, the latest step first."""
        found = [
            (step, attempt, Entry(step, path, finished=True))
            for step, attempt, path in self._folders()
            if (path / _ABANDONED_FILE).exists()
        ]
        return [entry for *_, entry in sorted(found, key=lambda item: item[:2], reverse=True)]

    def prepare(self, step: int) -> RemotePath:
        """Remove leftovers of a crash, and return the folder to write to."""
        self._directory.mkdir(parents=True, exist_ok=True)
        attempts = [0]
        for found_step, attempt, path in self._folders():
            if not (path / STATE_FILE).is_file():
                self.discard(path)
            elif found_step == step:
                attempts.append(attempt)
        attempt = max(attempts) + 1
        suffix = f".{attempt}" if attempt > 1 else ""
        return self._directory / f"{folder_name(step)}{suffix}"

    def discard(self, path: RemotePath) -> None:
        """Remove a checkpoint that was not finished."""
        path.remove_tree()

    def publish(self, written: RemotePath) -> RemotePath:
        """Make the checkpoint in a folder current; return the folder under its final name.

        Its files must be on the disk, `state.json` last.
        """
        return written

    def clean(self) -> None:
        """Remove checkpoints that were replaced by another one of the same step."""
        current: set[int] = set()
        for entry in self.entries():
            if entry.finished and entry.step in current:
                self.remove(self._directory / entry.path.name)
            elif entry.finished:
                current.add(entry.step)

    def remove(self, path: RemotePath) -> None:
        """Remove a checkpoint."""
        (path / STATE_FILE).unlink()
        if path.exists():
            path.remove_tree()

    def set_aside(self, path: RemotePath) -> RemotePath:
        """Mark a checkpoint as abandoned; return its new path."""
        (path / _ABANDONED_FILE).write_bytes(b"")
        return path

    def _folders(self) -> list[tuple[int, int, RemotePath]]:
        """Return step, attempt and path of every folder with the name of a checkpoint."""
        if not self._directory.is_dir():
            return []
        return [
            (int(name[1]), int(name[2] or 1), path)
            for path in self._directory.iterdir()
            if (name := _REMOTE_NAME.fullmatch(path.name)) and not _holds_checkpoints(path)
        ]


def _holds_checkpoints(path: Location) -> bool:
    """Return whether a folder with the name of a checkpoint is a directory of checkpoints.

    A loop that saves to `runs/step-000100` gets `runs/step-000100/step-000100`.
    """
    if (path / STATE_FILE).exists() or not path.is_dir():
        return False
    return any(_REMOTE_NAME.match(inner.name) and inner.is_dir() for inner in path.iterdir())


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
