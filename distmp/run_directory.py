"""The folder of a run: a new one for each run, the same one for a run that is resumed."""

from __future__ import annotations

import glob
from pathlib import Path

from distmp.errors import ConfigError


class RunDirectory:
    """Where everything that a run writes has its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.records = path / "steps.jsonl"
        self.curves = path / "curves.png"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.profile = path / "profile"
        self.manifest = path / "manifest.json"

    def log(self, rank: int) -> Path:
        """Return where a rank's output is copied to."""
        return self.path / "logs" / f"rank-{rank}.log"

    def owns(self, checkpoint: Path) -> bool:
        """Whether a checkpoint was written by this run."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()


def latest_run(run_dir: str) -> RunDirectory | None:
    """Return the newest folder made for `run_dir`: `run_dir` itself, or the highest `run_dir-N`."""
    first = Path(run_dir)
    numbered = {
        int(number): path
        for path in first.parent.glob(f"{glob.escape(first.name)}-*/")
        if (number := path.name.removeprefix(f"{first.name}-")).isdecimal()
    }
    if numbered:
        return RunDirectory(numbered[max(numbered)])
    return RunDirectory(first) if first.is_dir() else None


def create_run(run_dir: str) -> RunDirectory:
    """Make a folder for a new run: `run_dir`, or `run_dir-2` and so on where runs stand already.

    Raises:
        ConfigError: If the folder cannot be made.
    """
    first = path = Path(run_dir)
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return RunDirectory(path)
        except FileExistsError:
            number += 1
            path = Path(f"{first}-{number}")
        except OSError as error:
            raise ConfigError("run_dir", run_dir, f"cannot be made ({error.strerror})") from None
