"""Chooses the run directory of a job, and claims it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distmp.checkpoint.lease import Owner, last_owner
from distmp.checkpoint.store import StoredCheckpoint
from distmp.config import RunConfig
from distmp.errors import ConfigError
from distmp.training.run_directory import (
    RunDirectory,
    check_saves,
    create_run,
    existing_runs,
    latest_run,
)
from distmp.training.run_lease import RunDirectoryInUseError, RunLease


class DirectoryChoice:
    """The run directory of a job, chosen on rank 0: one to continue, or a new one.

    Args:
        config: The configuration of the run.
        job: This job.
        log: Prints a message.

    Attributes:
        lease: The lease on the directory; None before there is one.
    """

    def __init__(self, config: RunConfig, job: Owner, log: Callable[[str], object]) -> None:
        self.lease: RunLease | None = None
        self._config = config
        self._job = job
        self._log = log
        # Whether `resume: auto` found no directory, so that the job expects to create the first.
        self._found_none = False

    def continued(self, earlier: RunDirectory | None) -> RunDirectory | None:
        """Claim the directory to continue, before its checkpoints are read.

        Args:
            earlier: The directory of earlier attempts of this job.

        Returns:
            The directory; None for a new run, and for `resume` with a path.

        Raises:
            RunDirectoryInUseError: If another job owns the directory.
        """
        found = earlier
        if found is None and self._config.resume == "auto":
            found = self._to_continue()
            self._found_none = found is None
        if found is not None:
            self._claim(found)
        return found

    def final(self, checkpoint: StoredCheckpoint | None) -> RunDirectory:
        """Return the directory of the run that wrote the checkpoint, or create one; claim it.

        Args:
            checkpoint: The checkpoint to continue from; None for a new run.

        Raises:
            ConfigError: If it cannot be created, or another job owns it.
        """
        config = self._config
        newest = latest_run(config.run_dir, config.checkpoint.path)
        if self.lease is not None:
            newest = self.lease.directory
        if checkpoint is not None and newest is not None and newest.owns(checkpoint.path):
            if self.lease is None:
                self._claim(newest)
            newest.path.mkdir(parents=True, exist_ok=True)
            return newest
        before, self.lease = self.lease, None
        try:
            directory = self._create()
        finally:
            if before is not None:
                before.release()
        if before is not None and before.directory.records.exists():
            earlier = before.directory
            self._log(
                f"warning: {earlier.path} has records of steps, but there is no checkpoint in "
                f"{earlier.checkpoints}; training starts from the beginning in {directory.path}"
            )
        if config.checkpoint.path is not None:
            check_saves(directory.checkpoints)
        return directory

    def release(self) -> None:
        """Let other jobs use the directory, if one was claimed."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def _to_continue(self) -> RunDirectory | None:
        """Return the newest directory, but for a scheduler's job preferably the one it wrote to."""
        runs = existing_runs(self._config.run_dir, self._config.checkpoint.path)
        if (scheduler := self._job.scheduler) is not None:
            owners = [(run, _last_owner(run)) for run in runs]
            runs = [
                run
                for run, owner in owners
                if owner and owner.scheduler and owner.scheduler.name == scheduler.name
            ] or runs
        return runs[-1] if runs else None

    def _create(self) -> RunDirectory:
        """Create and claim a directory that no other job has used."""
        config = self._config
        first = RunDirectory(Path(config.run_dir), config.checkpoint.path)
        while True:
            directory = create_run(config.run_dir, config.checkpoint.path)
            if self._found_none and first.path != directory.path:
                # The same command, started twice: the other one was a moment earlier.
                directory.path.rmdir()
                self._claim(first)
                self.release()
                raise ConfigError(
                    "run_dir",
                    config.run_dir,
                    "another job has created it since this one started, and has ended; start this "
                    "one again to continue that run",
                )
            try:
                self._claim(directory, first=True)
            except RunDirectoryInUseError:
                continue
            return directory

    def _claim(self, directory: RunDirectory, *, first: bool = False) -> None:
        lease = RunLease(directory, self._job)
        lease.claim(self._log, first=first)
        self.lease = lease


def _last_owner(run: RunDirectory) -> Owner | None:
    return next(filter(None, map(last_owner, run.folders())), None)
