"""The leases of a run: exactly one job writes to a run directory and to its checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from distmp.checkpoint import lease as leases
from distmp.checkpoint.lease import HeldError, Lease, Owner, SchedulerJob
from distmp.distributed.orphans import is_orphan
from distmp.distributed.stopping import StopSignals, exit_code_after
from distmp.errors import ConfigError, DistmpError, TrainingError
from distmp.launcher.job import scheduled_job
from distmp.training.run_directory import RunDirectory
from distmp.utils.processes import ProcessIdentity

logger = logging.getLogger("distmp")

# Time for the last write of a process that is about to end; storage that hangs must not keep it.
_RELEASE_SECONDS = 2.0


class RunDirectoryInUseError(ConfigError):
    """Another job owns the run directory.

    Args:
        directory: The directory.
        owner: The other job.
    """

    def __init__(self, directory: RunDirectory, owner: Owner) -> None:
        self.owner = owner
        super().__init__(
            "run_dir",
            str(directory.path),
            f"belongs to another job, which is running ({owner}). Wait until it ends or stop it, "
            "or set another run_dir",
        )


class LostLeaseError(TrainingError):
    """Another job has taken over the run directory.

    Args:
        directory: The directory.
        owner: The new owner.
        is_same_job: Whether that is a later attempt of this job.
    """

    def __init__(self, directory: RunDirectory, owner: Owner, *, is_same_job: bool) -> None:
        self.is_same_job = is_same_job
        super().__init__(
            f"run_dir = {str(directory.path)!r} was taken over by another job ({owner}), because "
            f"this one did not renew its lease for {leases.SECONDS:.0f} s or was requeued; this "
            "job ends and writes nothing more"
        )


class StoppedWaitError(DistmpError):
    """A request to stop arrived while this job waited for the run directory.

    Args:
        directory: The directory.
        number: The signal.
    """

    def __init__(self, directory: RunDirectory, number: int) -> None:
        self.exit_code = exit_code_after(number)
        super().__init__(
            f"stopped by {signal.Signals(number).name} while waiting for run_dir = "
            f"{str(directory.path)!r} (exit code {self.exit_code})"
        )


def this_job(name: str) -> Owner:
    """Return the job that this process belongs to.

    Args:
        name: Its identity, the same in all its attempts.
    """
    scheduled = scheduled_job(os.environ)
    scheduler = None if scheduled is None else SchedulerJob(*scheduled)
    return Owner(name, socket.gethostname(), ProcessIdentity.of_this_process(), scheduler)


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
        self._leases = [Lease(folder, job) for folder in directory.folders()]
        self._job = job
        self._released = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def claim(self, log: Callable[[str], object], *, first: bool = False) -> None:
        """Become the owner; wait for a job that is ending or has ended without notice.

        Args:
            log: Receives a message before a wait.
            first: Only if the directory and its checkpoints never had an owner.

        Raises:
            RunDirectoryInUseError: If another job owns them.
            StoppedWaitError: If this process is asked to stop while it waits.
        """
        told: set[Owner] = set()

        def on_wait(owner: Owner) -> None:
            if StopSignals.last is not None:
                raise StoppedWaitError(self.directory, StopSignals.last)
            if owner not in told:
                told.add(owner)
                log(self._waiting(owner))

        for lease in self._leases:
            try:
                if first:
                    lease.claim_first()
                else:
                    lease.claim(on_wait)
            except HeldError as held:
                self.release()
                raise RunDirectoryInUseError(self.directory, held.owner) from None
            except StoppedWaitError:
                self.release()
                raise
            except OSError as error:
                self._warn(lease, error)
        self._thread.start()

    def _waiting(self, owner: Owner) -> str:
        return (
            f"run_dir = {str(self.directory.path)!r} belongs to {owner}; waiting until that job "
            f"renews its lease or ends (at most about {leases.SECONDS:.0f} s if it has ended)"
        )

    def check(self) -> None:
        """Check that this job still owns the run; costs nothing while the leases are renewed.

        Raises:
            LostLeaseError: If another job has taken over.
        """
        for lease in self._leases:
            try:
                lease.check()
            except HeldError as held:
                same = held.owner.job == self._job.job
                raise LostLeaseError(self.directory, held.owner, is_same_job=same) from None
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
                lease.folder,
                error,
            )
