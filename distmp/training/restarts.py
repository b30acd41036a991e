"""Going on after torchrun has restarted the ranks: where, from which checkpoint, how often.

What one attempt has to tell the next stands in the store of torchrun's agent, which belongs to this
job alone and outlives the ranks. What one job has to tell the next that its scheduler starts stands
in the manifest of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distmp.checkpoint import store as checkpoints
from distmp.checkpoint.location import Location, locate
from distmp.distributed import rendezvous_store
from distmp.errors import TrainingError
from distmp.faults.peers import Peers
from distmp.telemetry import RecordError, read_records
from distmp.training import manifest
from distmp.training.run_directory import RunDirectory

# After so many starts in a row that got no further than what they began with, there is no other.
RESTARTS_WITHOUT_GAIN = 3
STORE_SECONDS = 60.0


class Restarts:
    """The attempts at a run that torchrun restarts; where nothing restarts, there is only one.

    Args:
        store: Keeps what is told from attempt to attempt; None where nothing does.
        count: Restarts up to now.
        most: Restarts that there will be at most.
        world_size: Number of ranks.
        checkpoint_path: Setting `checkpoint.path`.

    Attributes:
        directory: The folder of the run in the attempts before; None if they made none.
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
        self._memory = None if store is None else rendezvous_store.PrefixStore("distmp/job", store)
        path = self._recall("directory") if count > 0 else None
        self.directory = None if path is None else RunDirectory(Path(path), checkpoint_path)

    @classmethod
    def of_this_job(cls, world_size: int, checkpoint_path: str | None = None) -> Restarts:
        """Return the attempts of the job that this process was started for."""
        kept = rendezvous_store.is_hosted_by_agent() and rendezvous_store.max_restarts() > 0
        store = rendezvous_store.connect(STORE_SECONDS) if kept else None
        count, most = rendezvous_store.restarts(), rendezvous_store.max_restarts()
        return cls(store, count, most, world_size, checkpoint_path)

    def checkpoint(self, configured: Callable[[], Location | None]) -> Location | None:
        """Return the checkpoint to go on from, or None to start anew. Collective over all ranks.

        Args:
            configured: Finds the one that the configuration names, for the first attempt.
        """
        if self.directory is None:
            return configured()
        first = self._recall("first checkpoint")
        own = None
        # Until this job has saved, the folder may hold later checkpoints than the one that it was
        # told to begin with; a run that began anew has none but its own.
        if first is None or self._recall("saved"):
            own = checkpoints.resolve("auto", self.directory.checkpoints)
        return own or (locate("resume", first) if first else None)

    def begin(self, directory: RunDirectory, checkpoint: Location | None) -> None:
        """Note where this attempt works and what it begins with; rank 0 calls it.

        Raises:
            TrainingError: If restarting has proved to be of no use.
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
            raise _futile(futile + 1, reached, self.cause(), "Mend that", directory)

    def check_gain(self, directory: RunDirectory, step: int, cause: str) -> None:
        """See whether it is of use to start a run again that was stopped; rank 0 calls it.

        Args:
            directory: The run's.
            step: Where it stands, with a checkpoint.
            cause: What has stopped it.

        Raises:
            TrainingError: If as many jobs as there may be restarts have not gained a step.
        """
        starts = manifest.starts_at(directory.manifest, step)
        if starts >= RESTARTS_WITHOUT_GAIN:
            self.give_up(TrainingError.exit_code)
            remedy = "Give a job more time than its start, a step and a save take"
            raise _futile(starts, step, cause, remedy, directory)

    def note_saved(self) -> None:
        """Note that this job has saved a checkpoint of its own."""
        self._note("saved", True)

    def give_up(self, exit_code: int) -> None:
        """Have all attempts to come end at once, with an exit code."""
        self._note("given up", exit_code)

    def given_up(self) -> int | None:
        """Return the exit code that is all that is left to do, or None."""
        return self._recall("given up")

    def announce(self, step: int) -> str | None:
        """Return what to say about this attempt, or None for the first one."""
        if self.count == 0:
            return None
        where = f"going on from step {step}" if step else "there was no checkpoint yet"
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
        if self._memory is not None:
            self._memory.set(key, json.dumps(value))

    def _recall(self, key: str) -> Any:
        if self._memory is None or not self._memory.check([key]):
            return None
        return json.loads(self._memory.get(key))


def _futile(
    times: int, step: int, cause: str, remedy: str, directory: RunDirectory
) -> TrainingError:
    return TrainingError(
        f"{times} times in a row the run ended after step {step}, the last time because of this: "
        f"{cause}; it is not started again. {remedy}, and go on with --resume "
        f"{directory.checkpoints}"
    )


def _last_step(directory: RunDirectory) -> int:
    """Return the last step that the run has a record of."""
    try:
        return max((record.step for record in read_records(directory.records)), default=0)
    except (OSError, RecordError):
        return 0
