"""Restarts of a run: in which folder, from which checkpoint, and how often.

Attempts within a job exchange notes through the store of torchrun's agent, which belongs to the job
and outlives its ranks. Jobs that a scheduler starts one after the other use the run's manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distmp.checkpoint import store as checkpoints
from distmp.checkpoint.store import StoredCheckpoint
from distmp.distributed import rendezvous_store
from distmp.errors import TrainingError
from distmp.faults.peers import Peers
from distmp.telemetry import RecordError, read_records
from distmp.training import manifest
from distmp.training.run_directory import RunDirectory

# A run is not restarted after this many consecutive starts that gained no step.
RESTARTS_WITHOUT_GAIN = 3
STORE_SECONDS = 60.0


class Restarts:
    """The attempts of a job at a run; without a launcher that restarts, there is one.

    Args:
        store: Keeps notes from attempt to attempt; None without such a store.
        count: Restarts up to now.
        most: Largest number of restarts.
        world_size: Number of ranks.
        checkpoint_path: Setting `checkpoint.path`.

    Attributes:
        directory: The folder of the run in earlier attempts; None if they made none.
    """

    def __init__(
        self,
        store: rendezvous_store.Store | None,
        count: int,
        most: int,
        world_size: int,
        checkpoint_path: str | None = None,
    ) -> None:
        self.count = count
        self.most = most
        self._world_size = world_size
        self._store = store
        self._notes = None if store is None else rendezvous_store.PrefixStore("distmp/job", store)
        path = self._recall("directory") if count > 0 else None
        self.directory = None if path is None else RunDirectory(Path(path), checkpoint_path)

    @classmethod
    def of_this_job(cls, world_size: int, checkpoint_path: str | None = None) -> Restarts:
        """Return the attempts of the job that this process belongs to."""
        kept = rendezvous_store.is_hosted_by_agent() and rendezvous_store.max_restarts() > 0
        store = rendezvous_store.connect(STORE_SECONDS) if kept else None
        count, most = rendezvous_store.restarts(), rendezvous_store.max_restarts()
        return cls(store, count, most, world_size, checkpoint_path)

    def checkpoint(
        self, configured: Callable[[], StoredCheckpoint | None]
    ) -> StoredCheckpoint | None:
        """Return the checkpoint to continue from; None for a new run. Collective over all ranks.

        Args:
            configured: Finds the checkpoint that the configuration names, for the first attempt.
        """
        if self.directory is None:
            return configured()
        first = self._recall("first checkpoint")
        own = None
        # Until this job has saved, the folder may contain later checkpoints than the one that the
        # job started from; the folder of a new run contains only its own.
        if first is None or self._recall("saved"):
            own = checkpoints.resolve("auto", self.directory.checkpoints)
        if own is not None or not first:
            return own
        return checkpoints.resolve(first, self.directory.checkpoints)

    def begin(self, directory: RunDirectory, checkpoint: StoredCheckpoint | None) -> None:
        """Note the folder and the checkpoint of this attempt. Rank 0 calls it.

        Raises:
            TrainingError: If the last restarts gained no step.
        """
        if self.directory is None:
            self._note("first checkpoint", None if checkpoint is None else str(checkpoint))
            self._note("directory", str(directory.path))
            return
        reached, best = _last_step(directory), self._recall("reached")
        futile = 0 if best is None or reached > best else self._recall("futile") + 1
        self._note("reached", reached if best is None else max(reached, best))
        self._note("futile", futile)
        if futile >= RESTARTS_WITHOUT_GAIN:
            self.give_up(TrainingError.exit_code)
            raise _futile(futile + 1, reached, self.cause(), "Fix the cause", directory)

    def check_gain(self, directory: RunDirectory, step: int, cause: str) -> None:
        """Check that the last jobs of a run that was stopped gained a step. Rank 0 calls it.

        Args:
            directory: Folder of the run.
            step: The current step, which has a checkpoint.
            cause: Why the run was stopped.

        Raises:
            TrainingError: If the last `RESTARTS_WITHOUT_GAIN` jobs started at this step.
        """
        starts = manifest.starts_at(directory.manifest, step)
        if starts >= RESTARTS_WITHOUT_GAIN:
            self.give_up(TrainingError.exit_code)
            remedy = "Give a job more time than startup, one step and one save take"
            raise _futile(starts, step, cause, remedy, directory)

    def note_saved(self) -> None:
        """Note that this job has saved a checkpoint."""
        self._note("saved", True)

    def give_up(self, exit_code: int) -> None:
        """Make all later attempts end at once, with an exit code."""
        self._note("given up", exit_code)

    def given_up(self) -> int | None:
        """Return the exit code with which this attempt has to end at once; None if it may run."""
        return self._recall("given up")

    def describe_attempt(self, step: int) -> str | None:
        """Return a message about this attempt, or None for the first one."""
        if self.count == 0:
            return None
        where = f"continuing from step {step}" if step else "there was no checkpoint yet"
        return f"restart {self.count} of {self.most}: {self.cause()}; {where}"

    def cause(self) -> str:
        """Return why the last attempt ended."""
        if self._store is not None:
            before = rendezvous_store.of_attempt(self._store, self.count - 1, self._world_size)
            ending = Peers(
                rendezvous_store.PrefixStore("peers", before), 0, self._world_size
            ).ending()
            if ending is not None:
                return ending.cause
        return "ranks were killed, or their machine was lost"

    def _note(self, key: str, value: Any) -> None:
        if self._notes is not None:
            self._notes.set(key, json.dumps(value))

    def _recall(self, key: str) -> Any:
        if self._notes is None or not self._notes.check([key]):
            return None
        return json.loads(self._notes.get(key))


def _futile(
    times: int, step: int, cause: str, remedy: str, directory: RunDirectory
) -> TrainingError:
    return TrainingError(
        f"{times} times in a row the run ended after step {step}, the last time because of: "
        f"{cause}; it is not restarted. {remedy}, and continue with --resume "
        f"{directory.checkpoints}"
    )


def _last_step(directory: RunDirectory) -> int:
    """Return the last step with a record."""
    try:
        return max((record.step for record in read_records(directory.records)), default=0)
    except (OSError, RecordError):
        return 0
