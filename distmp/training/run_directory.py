"""The directory of a run: a new one for a new run, the same one for a run that resumes."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

from distmp.checkpoint.storage import locate
from distmp.errors import ConfigError


class RunDirectory:
    """The paths of everything that a run writes.

    Args:
        path: The run's directory.
        checkpoint_path: Setting `checkpoint.path`: the parent of the checkpoint directories of
            runs.
    """

    def __init__(self, path: Path, checkpoint_path: str | None = None) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.records = path / "steps.jsonl"
        self.checkpoints: Path = path / "checkpoints"
        if checkpoint_path is not None:
            self.checkpoints = locate("checkpoint.path", checkpoint_path) / path.name
        self.profile = path / "profile"
        self.manifest = path / "manifest.json"

    def log(self, rank: int) -> Path:
        """Return the file to which a rank's output is copied."""
        return self.path / "logs" / f"rank-{rank}.log"

    def leased_paths(self) -> list[Path]:
        """Return the directories that the run writes to: its own, and that of its checkpoints."""
        inside = self.checkpoints == self.path / "checkpoints"
        return [self.path] if inside else [self.path, self.checkpoints]

    def owns(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint was written by this run."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()


def check_saves(checkpoints: Path) -> None:
    """Create the directory of the checkpoints of a new run.

    Raises:
        ConfigError: If it cannot be created or written to, before hours of training end in it.
    """
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        if isinstance(checkpoints, Path) and not os.access(checkpoints, os.W_OK):
            raise OSError("it is read-only")
    except OSError as error:
        raise ConfigError(
            "checkpoint.path", str(checkpoints), f"cannot be written to: {error}"
        ) from error


def latest_run(run_dir: str, checkpoint_path: str | None = None) -> RunDirectory | None:
    """Return the newest directory created for `run_dir`, see `existing_runs`."""
    runs = existing_runs(run_dir, checkpoint_path)
    return runs[-1] if runs else None


def existing_runs(run_dir: str, checkpoint_path: str | None = None) -> list[RunDirectory]:
    """Return the directories created for `run_dir`: `run_dir` itself, then each `run_dir-N`.

    Args:
        run_dir: Setting `run_dir`.
        checkpoint_path: Setting `checkpoint.path`. A run with a directory there counts too: it may
            have been started on another machine.

    Raises:
        ConfigError: If the directory cannot be read.
    """
    first = Path(run_dir)
    try:
        exists = first.is_dir()
    except OSError as error:
        raise ConfigError("run_dir", run_dir, f"cannot be read ({error.strerror})") from None
    names = {path.name for path in first.parent.glob(f"{glob.escape(first.name)}*/")}
    if checkpoint_path is not None:
        names |= _directories_in(locate("checkpoint.path", checkpoint_path))
    numbers = sorted(
        int(number)
        for name in names
        if (number := name.removeprefix(f"{first.name}-")) != name and number.isdecimal()
    )
    paths = [first] * (exists or first.name in names)
    paths += [Path(f"{first}-{number}") for number in numbers]
    return [RunDirectory(path, checkpoint_path) for path in paths]


def create_run(run_dir: str, checkpoint_path: str | None = None) -> RunDirectory:
    """Create a directory for a new run: `run_dir`, or `run_dir-2` and so on if it exists.

    Args:
        run_dir: Setting `run_dir`.
        checkpoint_path: Setting `checkpoint.path`. Names of directories there are not used either.

    Raises:
        ConfigError: If the directory cannot be created.
    """
    first = path = Path(run_dir)
    taken = set()
    if checkpoint_path is not None:
        taken = _directories_in(locate("checkpoint.path", checkpoint_path))
    number = 1
    while True:
        try:
            if path.name not in taken:
                path.mkdir(parents=True)
                return RunDirectory(path, checkpoint_path)
        except FileExistsError:
            if number == 1 and not path.is_dir():
                raise ConfigError("run_dir", run_dir, "is a file; name a directory") from None
        except OSError as error:
            raise ConfigError("run_dir", run_dir, f"cannot be created ({error.strerror})") from None
        number += 1
        path = Path(f"{first}-{number}")


def try_to_write(path: Path, write: Callable[[Path], object], log: Callable[[str], object]) -> None:
    """Write an optional file; log a message if that fails."""
    try:
        write(path)
    except OSError as error:
        log(f"cannot write {path}: {error}; training continues without it")


def _directories_in(place: Path) -> set[str]:
    """Return the names of the entries of a directory; none if it does not exist.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        return {path.name for path in place.iterdir()} if place.is_dir() else set()
    except Exception as error:
        raise ConfigError("checkpoint.path", str(place), f"cannot be read ({error!r})") from error
