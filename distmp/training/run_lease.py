"""The leases of a run: exactly one job writes to a run directory and to its checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distmp.checkpoint import lease as leases
from distmp.checkpoint.lease import HeldError, Lease, Owner, last_owner
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import RunConfig
from distmp.distributed.orphans import is_orphan
from distmp.distributed.stopping import StopSignals, exit_code_after
from distmp.errors import ConfigError, DistmpError, TrainingError
from distmp.launcher.job import scheduled_job
from distmp.training import run_directory
from distmp.training.run_directory import RunDirectory
from distmp.utils.processes import ProcessIdentity

logger = logging.getLogger("distmp")

# Time for the last write of a process that is about to end; storage that hangs must not block it.
_RELEASE_SECONDS = 2.0


class LostLeaseError(TrainingError):
    """Another job has taken over the run directory.

    Args:
        message: The message.
        is_same_job: Whether that is a later attempt of this job.
    """

    def __init__(self, message: str, *, is_same_job: bool) -> None:
        super().__init__(message)
        self.is_same_job = is_same_job


def this_job(name: str) -> Owner:
    """Return the job that this process belongs to.

    Args:
        name: Its identity, the same in all its attempts.
    """
    process = ProcessIdentity.of_this_process()
    return Owner(name, socket.gethostname(), process, *scheduled_job(os.environ))


class RunLease:
    """The leases of rank 0 on a run directory and, if they are elsewhere, on its checkpoints.

    A thread renews them. Where a lease cannot be written, training continues without it, as it does
    without other files.

    Args:
        directory: The directory of the run.
        job: This job.
    """

    def __init__(self, directory: RunDirectory, job: Owner) -> None:
        self.directory = directory
        self._run_dir = repr(str(directory.path))
        owner = replace(job, run_directory=str(directory.path))
        self._leases = [Lease(path, owner) for path in directory.leased_paths()]
        self._job = job
        self._released = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def claim(self, log: Callable[[str], object], *, first: bool = False) -> None:
        """Become the owner; wait for a job that is ending or has ended without notice.

        Args:
            log: Receives a message before a wait.
            first: Only if no other job can own the directory or its checkpoints; does not wait.

        Raises:
            ConfigError: If another job owns them.
            DistmpError: If this process receives a request to stop while it waits.
        """
        told: set[Owner] = set()

        def on_wait(owner: Owner) -> None:
            if StopSignals.last is not None:
                raise self._stopped(StopSignals.last)
            if owner not in told:
                told.add(owner)
                log(
                    f"run_dir = {self._run_dir} belongs to {owner}; waiting until that job renews "
                    f"its lease or ends (at most about {leases.SECONDS:.0f} s if it has ended)"
                )

        for lease in self._leases:
            try:
                lease.claim(on_wait, first=first)
            except OSError as error:
                self._warn(lease, error)
            except DistmpError as error:
                self.release()
                if not isinstance(error, HeldError):
                    raise
                raise ConfigError(
                    "run_dir",
                    str(self.directory.path),
                    f"belongs to another job, which is running ({error.owner}). Wait until it ends "
                    "or stop it, or set another run_dir",
                ) from None
        self._thread.start()

    def _stopped(self, number: int) -> DistmpError:
        code, name = exit_code_after(number), signal.Signals(number).name
        error = DistmpError(
            f"stopped by {name} while waiting for run_dir = {self._run_dir} (exit code {code})"
        )
        error.exit_code = code
        return error

    def check(self) -> None:
        """Check that this job still owns the run; costs nothing while the leases are renewed.

        Raises:
            LostLeaseError: If another job has taken over.
        """
        for lease in self._leases:
            try:
                lease.check()
            except HeldError as held:
                raise LostLeaseError(
                    f"run_dir = {self._run_dir} was taken over by another job ({held.owner}), "
                    f"because this one did not renew its lease for {leases.SECONDS:.0f} s or was "
                    "requeued; this job ends and writes nothing more",
                    is_same_job=held.owner.job == self._job.job,
                ) from None
            except Exception as error:  # noqa: BLE001  (see `claim`)
                self._warn(lease, error)

    def release(self) -> None:
        """Let the next job own the run. Does nothing the second time."""
        if self._released.is_set():
            return
        self._released.set()
        worker = threading.Thread(target=self._release, name="lease release", daemon=True)
        worker.start()
        worker.join(_RELEASE_SECONDS)

    def _release(self) -> None:
        for lease in self._leases:
            with contextlib.suppress(Exception):  # it expires
                lease.release()

    def _renew(self) -> None:
        while not self._released.wait(leases.SECONDS / leases.RENEWALS):
            # A job that starts now waits for the end of this one.
            ending = StopSignals.last is not None or is_orphan()
            for lease in self._leases:
                try:
                    lease.renew(leases.ENDING if ending else None)
                except Exception as error:  # noqa: BLE001  (see `claim`)
                    self._warn(lease, error)

    def _warn(self, lease: Lease, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "cannot write the lease in %s: %r; training continues, but a second job with this "
                "run_dir is not detected",
                lease.directory,
                error,
            )


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
        self._place = (config.run_dir, config.checkpoint.path)
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
            ConfigError: If another job owns the directory.
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
        runs = run_directory.existing_runs(*self._place)
        if self.lease is not None:
            runs = [self.lease.directory]
        for run in runs:
            if checkpoint is not None and run.owns(checkpoint.path):
                if self.lease is None:
                    self._claim(run)
                run.path.mkdir(parents=True, exist_ok=True)
                return run
        before = self.lease
        directory = self._create()
        taken, why = Path(self._config.run_dir).absolute(), ""
        if before is not None:
            before.release()
            taken = before.directory.path
            why = ", but has no checkpoint to continue from, so training starts from the beginning"
        if taken != directory.path:
            self._log(f"{taken} is taken{why}; this run writes to {directory.path}")
        return directory

    def release(self) -> None:
        """Let other jobs use the directory, if one was claimed."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def _to_continue(self) -> RunDirectory | None:
        """Return the latest run, but for a scheduler's job preferably one that it wrote to.

        Raises:
            ConfigError: If there are only checkpoints of other runs, of the same name.
        """
        runs = run_directory.existing_runs(*self._place)
        scheduler = self._job.scheduler
        own = [run for run in runs if scheduler and _scheduler_job(run) == scheduler]
        own = own or [run for run in runs if _other_run(run) is None]
        if runs and not own:
            checkpoints = runs[-1].checkpoints
            raise ConfigError(
                "checkpoint.path",
                self._config.checkpoint.path,
                f"{checkpoints} has the checkpoints of the run {_other_run(runs[-1])}, and this is "
                f"the run {runs[-1].path}; give it a run_dir with another last name, or continue "
                f"that run with --resume {checkpoints}",
            )
        return self._latest(own) if own else None

    def _latest(self, runs: list[RunDirectory]) -> RunDirectory:
        """Return the latest run with a checkpoint; the last one if none has any.

        Raises:
            ConfigError: If another job trains in a later one.
        """
        latest = run_directory.latest_of(runs)
        for later in runs[runs.index(latest) + 1 :]:
            self._claim(later)
            self.release()
            self._log(f"{later.path} has no checkpoint; continuing in {latest.path}")
        return latest

    def _create(self) -> RunDirectory:
        """Create and claim a directory, or claim the newest one if no run has trained there."""
        config = self._config
        first = RunDirectory(Path(config.run_dir), config.checkpoint.path)
        newest = run_directory.existing_runs(*self._place)[-1:]
        unused = [run for run in newest if run.is_unused() and not self._found_none]
        while True:
            directory = unused.pop() if unused else run_directory.create_run(*self._place)
            if self._found_none and first.path != directory.path:
                # Another job, perhaps of the same command, has created the first directory.
                directory.path.rmdir()
                self._claim(first)
                self.release()
                raise ConfigError(
                    "run_dir",
                    config.run_dir,
                    "another job has created it since this one started, and has ended; start this "
                    "one again to continue that run",
                )
            if config.checkpoint.path is not None:
                run_directory.check_saves(directory.checkpoints)
            with contextlib.suppress(ConfigError):
                self._claim(directory, first=True)
                return directory

    def _claim(self, directory: RunDirectory, *, first: bool = False) -> None:
        lease = RunLease(directory, self._job)
        lease.claim(self._log, first=first)
        self.lease = lease


def _other_run(run: RunDirectory) -> str | None:
    """Return the directory of the run that wrote a run's checkpoints, if that is another one.

    Below `checkpoint.path`, the checkpoints of runs in different places may have the same name.
    """
    owner = last_owner(run.checkpoints)
    written_by = "" if owner is None else owner.run_directory
    is_own = not written_by or Path(written_by).resolve() == run.path.resolve()
    return None if is_own else written_by


def _scheduler_job(run: RunDirectory) -> str | None:
    """Return the name of the scheduler's job that was the last to own a run, if it is known."""
    owner = next(filter(None, map(last_owner, run.leased_paths())), None)
    return None if owner is None else owner.scheduler
