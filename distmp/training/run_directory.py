"""The directory of a run: a new one for a new run, the same one for a run that resumes.

Its manifest has an entry for each start, with code, settings, machines and processes.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from distmp.checkpoint.storage import entries_of, locate
from distmp.distributed import rendezvous_store
from distmp.distributed.world import World
from distmp.errors import ConfigError, DistmpError
from distmp.masking import masked
from distmp.utils.environment_info import relevant, versions
from distmp.utils.files import PRIVATE, replacing
from distmp.utils.processes import output_of

logger = logging.getLogger("distmp")


class RunDirectory:
    """The paths of everything that a run writes.

    Args:
        path: The run's directory.
        checkpoint_path: Setting `checkpoint.path`: the parent of the checkpoint directories of
            runs.
    """

    def __init__(self, path: Path, checkpoint_path: str | None = None) -> None:
        # A callback may change the working directory.
        self.path = path = path.absolute()
        self.config = path / "config.yaml"
        self.records = path / "steps.jsonl"
        self.checkpoints: Path = path / "checkpoints"
        if checkpoint_path is not None:
            self.checkpoints = locate("checkpoint.path", checkpoint_path).absolute() / path.name
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

    def has_checkpoint(self) -> bool:
        """Return whether there is a finished checkpoint of a step that was taken."""
        return any(each.finished and each.step for each in entries_of(self.checkpoints))

    def is_named_by_user(self) -> bool:
        """Return whether the first start of the run names this directory, also if it was moved."""
        try:
            configuration = read_starts(self.manifest)[0]["configuration"]
            return Path(configuration["run_dir"]).name == self.path.name
        except (OSError, ManifestError, LookupError, TypeError):
            return False

    def is_unused(self) -> bool:
        """Return whether the directory holds at most what a run writes before its first step."""
        early = {self.config, self.manifest, self.log(0).parent, self.checkpoints}
        found = {*self.path.glob("*"), *self.checkpoints.glob("*")} - early
        kept = [path for path in found if path != self.records or path.stat().st_size]
        return os.access(self.path, os.W_OK) and all(p.match("lease-*.json") for p in kept)


def check_saves(checkpoints: Path) -> None:
    """Create the directory of the checkpoints of a new run, below `checkpoint.path`.

    Raises:
        ConfigError: If it cannot be created or written to, before hours of training end in it.
    """
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        if not os.access(checkpoints, os.W_OK):
            raise OSError(f"{checkpoints} is read-only")
    except OSError as error:
        problem = f"cannot be written to: {error}"
        raise ConfigError("checkpoint.path", str(checkpoints.parent), problem) from error


def latest_of(runs: Sequence[RunDirectory]) -> RunDirectory:
    """Return the last run with a checkpoint; if none has one, the last run."""
    return ([run for run in runs if run.has_checkpoint()] or runs)[-1]


def existing_runs(run_dir: str, checkpoint_path: str | None = None) -> list[RunDirectory]:
    """Return the directories created for `run_dir`: `run_dir` itself, then each `run_dir-N`.

    A `run_dir-N` that is the setting `run_dir` of another run is not one of them.

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
        if (number := name.removeprefix(f"{first.name}-")) != name
        and number.isdecimal()
        and str(int(number)) == number
    )
    paths = [first] * (exists or first.name in names)
    paths += [Path(f"{first}-{number}") for number in numbers]
    runs = [RunDirectory(path, checkpoint_path) for path in paths]
    return [run for run in runs if run.path.name == first.name or not run.is_named_by_user()]


def create_run(run_dir: str, checkpoint_path: str | None = None) -> RunDirectory:
    """Create a directory for a new run: `run_dir`, or `run_dir-2` and so on if it exists.

    Args:
        run_dir: Setting `run_dir`.
        checkpoint_path: Setting `checkpoint.path`. Names of directories there are not used either.

    Raises:
        ConfigError: If the directory cannot be created.
    """
    first = path = Path(run_dir)
    taken = {run.path.name for run in existing_runs(run_dir, checkpoint_path)}
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


_GIT_SECONDS = 5.0


class ManifestError(DistmpError, ValueError):
    """A file that is not a manifest."""


def record_start(
    path: Path, world: World, configuration: Mapping[str, Any], **entries: Any
) -> None:
    """Add this start of a run to its manifest; every rank has to call it, rank 0 writes.

    Args:
        path: The manifest.
        world: The ranks.
        configuration: The resolved configuration, nested.
        **entries: Other entries of this start, such as the steps done before it.

    Raises:
        SetupError: On every rank, if the file exists and is not a manifest.
    """
    own = {"host": socket.gethostname(), "pid": os.getpid(), "device": device_name(world)}
    ranks = world.ranks.gather(own)

    def write(path: Path) -> None:
        start = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "restart": rendezvous_store.attempt(),
            "command": masked(sys.orig_argv),
            "working_directory": os.getcwd(),
            "configuration": masked(configuration),
            "versions": versions(),
            "code": revision(Path.cwd()),
            "environment": relevant(os.environ),
        }
        append_start(path, {**start, **entries, "ranks": ranks})

    world.ranks.from_rank_0(lambda: try_to_write(path, write, logger.warning))


def device_name(world: World) -> str:
    """Return the device of a rank, with the model of the GPU."""
    if world.device.type != "cuda":
        return str(world.device)
    import torch

    return f"{world.device} ({torch.cuda.get_device_name(world.device)})"


def revision(directory: Path) -> dict[str, Any] | None:
    """Return the commit of a directory's git repository, and whether it has changes, or None.

    Args:
        directory: A directory of the repository.
    """
    git = partial(output_of, "git", "-C", str(directory), seconds=_GIT_SECONDS)
    if (commit := git("rev-parse", "HEAD")) is None:
        return None
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if status is None else bool(status.strip())}


def append_start(path: Path, start: Mapping[str, Any]) -> None:
    """Add a start to the manifest of a run; the file is replaced atomically.

    Raises:
        ManifestError: If the file exists and is not a manifest.
    """
    starts = [*read_starts(path), start] if path.exists() else [start]
    text = json.dumps({"starts": starts}, indent=2, default=str)
    with replacing(path, mode=PRIVATE) as file:
        file.write(text.encode() + b"\n")


def read_starts(path: Path) -> Sequence[dict[str, Any]]:
    """Return all starts of a run, in order.

    Raises:
        ManifestError: If the file is not a manifest.
    """
    try:
        return [*json.loads(path.read_text())["starts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path}: not a manifest ({error}); fix or delete it") from None
