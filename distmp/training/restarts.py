"""Selects the directory and the checkpoint of a restart, and limits the number of restarts.

Attempts within a job share values through the store of torchrun's agent, which belongs to the job
and outlives its ranks. Jobs that a scheduler starts one after the other use the run's manifest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import uuid
from base64 import b64decode
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distmp.checkpoint import recovery
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import RunConfig
from distmp.distributed import rendezvous_store
from distmp.distributed.limits import REJOIN_SECONDS
from distmp.distributed.orphans import is_orphan
from distmp.errors import TrainingError, listed, require
from distmp.faults.watchdog import ending_of
from distmp.launcher.rendezvous import load_state
from distmp.masking import HIDDEN, masked
from distmp.telemetry.records import RecordError, read_records
from distmp.training.run_directory import RunDirectory
from distmp.training.run_fingerprint import to_json
from distmp.utils.settings import flat, from_mapping, join

logger = logging.getLogger("distmp")

# A run is not restarted after this many restarts in a row without a step beyond earlier ones.
RESTARTS_WITHOUT_GAIN = 3
MORE_MACHINES = "more machines have joined"


@dataclass
class Restarts:
    """The attempts of a job to finish a run: one, unless a launcher restarts the ranks.

    Args:
        store: Shared by the attempts; None if there is no such store.
        count: Restarts up to now.
        max_restarts: Restarts after a failure that each machine is allowed.
        world_size: Number of ranks.
        checkpoint_path: Setting `checkpoint.path`.
    """

    store: rendezvous_store.Store | None
    count: int
    max_restarts: int
    world_size: int
    checkpoint_path: str | None = None

    def __post_init__(self) -> None:
        self._values = None
        if self.store is not None:
            self._values = rendezvous_store.PrefixStore("distmp/job", self.store)

    @classmethod
    def of_this_job(cls, world_size: int, checkpoint_path: str | None = None) -> Restarts:
        """Return the attempts of the job that this process belongs to."""
        count = rendezvous_store.attempt()
        max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        # Even without restarts after a failure, a machine that joins or leaves restarts all ranks.
        kept = rendezvous_store.is_hosted_by_agent()
        store = rendezvous_store.connect(REJOIN_SECONDS) if kept else None
        return cls(store, count, max_restarts, world_size, checkpoint_path)

    @cached_property
    def directory(self) -> RunDirectory | None:
        """The directory of the run in earlier attempts; None if they made none."""
        path = self._stored_value("directory") if self.count > 0 else None
        return None if path is None else RunDirectory(Path(path), self.checkpoint_path)

    def configuration(self, config: RunConfig, rank: int) -> RunConfig:
        """Return the configuration of the first attempt: its file may have changed since then.

        Secrets are not stored, and keep their current values.

        Args:
            config: The configuration that this attempt has read.
            rank: The rank of this process.

        Raises:
            ConfigError: If a setting with a secret in it has changed.
        """
        # On the keys that a former run of this process left in the store, ranks would wait forever.
        started = f"rank {rank} has started attempt {self.count}"
        problem = "this process has trained before; start each run with new processes (torchrun)"
        require(self._stored_value(started) is None, "distmp.train.main", "a second call", problem)
        self._store_value(started, True)
        current = to_json(config)
        now = masked(current)
        # In the first attempt, each rank keeps its own, which the preflight compares.
        first = self._stored_value("configuration") if self.count > 0 else None
        if first is None and rank == 0:
            self._store_value("configuration", now)
        if first in (None, now):
            return config
        config = from_mapping(type(config), _revealed(first, now, current))
        self.checkpoint_path = config.checkpoint.path
        if rank == 0:
            before, after = flat(first), flat(now)
            changed = [name for name in before | after if before.get(name) != after.get(name)]
            logger.warning(
                "the configuration has changed since this job started (%s); this restart continues "
                "with the first one, and a new job uses the changed one",
                listed(changed),
            )
        return config

    def resumes(self) -> list[str] | None:
        """Return values of `resume` for the directory of earlier attempts; the first that exists.

        None if there was no earlier attempt. Rank 0 calls it: a process of the last attempt that
        has not ended yet may still store values.
        """
        if self.directory is None:
            return None
        first = self._stored_value("first checkpoint")
        if first is None:  # the directory of a new run contains only its own checkpoints
            return ["auto"]
        # Until a save of this job has set them aside, the directory may contain later checkpoints
        # than the one that the job started from.
        newest = recovery.newest_healthy(self.directory.checkpoints)
        job = None if newest is None else StoredCheckpoint(newest).state.numbers.get("job")
        return ["auto", first] if job == self.job() else [first]

    def begin(self, directory: RunDirectory, checkpoint: StoredCheckpoint | None) -> None:
        """Store the directory and the checkpoint of this attempt. Rank 0 calls it.

        Raises:
            TrainingError: If the last restarts completed no step beyond those of earlier attempts.
            RecordError: If a line of the record file is damaged.
        """
        if self.directory is None:
            self._store_value("first checkpoint", None if checkpoint is None else str(checkpoint))
            self._store_value("directory", str(directory.path))
            return
        try:
            # Without a record file, the checkpoint shows how far earlier attempts came.
            saved = 0 if checkpoint is None else checkpoint.state.step
            reached = max(_last_step(directory), saved)
        except RecordError as error:
            # Every later attempt would fail to append to this file, too.
            self.give_up(error.exit_code)
            raise
        best = self._stored_value("reached")
        # A machine that joins or leaves is no failure of the run.
        joined_or_left = self._stored_value("ranks") not in (None, self.world_size)
        gained = best is None or reached > best or joined_or_left
        futile = 0 if gained else (self._stored_value("futile") or 0) + 1
        self._store_value("ranks", self.world_size)
        self._store_value("reached", reached if best is None else max(reached, best))
        self._store_value("futile", futile)
        if futile >= RESTARTS_WITHOUT_GAIN:
            self.give_up(TrainingError.exit_code)
            raise TrainingError(
                f"{futile + 1} times in a row the run ended without a step beyond {best}, the last "
                f"time because of: {self.cause()}; it is not restarted. Fix the cause, and "
                f"continue with --resume {directory.checkpoints}"
            )

    def job(self) -> str:
        """Return the identity of this job, the same in all its attempts. Rank 0 calls it."""
        job = self._stored_value("job")
        if job is None:
            job = uuid.uuid4().hex
            self._store_value("job", job)
        return str(job)

    def give_up(self, exit_code: int) -> None:
        """Make all later attempts exit immediately, with an exit code."""
        self._store_value("given up", exit_code)

    def follows(self, received: Collection[int | None]) -> bool:
        """Return whether torchrun stopped the ranks to start them again with more machines.

        It sends SIGTERM, as a user may do to stop the run. So this looks for machines that torchrun
        is about to admit; a launcher beyond `--nnodes` is none.

        Args:
            received: The signal that each rank has received, if any.
        """
        state = f"torch.rendezvous.{os.environ.get('TORCHELASTIC_RUN_ID')}"
        stopped_by_torchrun = {*received} - {None} == {signal.SIGTERM}
        if self.store is None or not stopped_by_torchrun or not self.store.check([state]):
            return False
        waiting = bool(load_state(b64decode(self.store.get(state))).wait_list)
        if waiting:
            self._store_value(f"cause {self.count}", MORE_MACHINES)
        return waiting

    def given_up(self) -> int | None:
        """Return the exit code if this attempt must exit immediately; None if it may run."""
        return self._stored_value("given up")

    def describe_attempt(self, step: int) -> str | None:
        """Return a message about this attempt, or None for the first one."""
        if self.count == 0:
            return None
        where = f"continuing from step {step}" if step else "there was no checkpoint yet"
        most = f" of {self.max_restarts}" if self.count <= self.max_restarts else ""
        return f"restart {self.count}{most}: {self.cause()}; {where}"

    def cause(self) -> str:
        """Return why the last attempt ended."""
        if (noted := self._stored_value(f"cause {self.count - 1}")) is not None:
            return str(noted)
        if self.store is not None:
            before = rendezvous_store.for_attempt(self.store, self.count - 1)
            if ending := ending_of(rendezvous_store.PrefixStore("peers", before)):
                return ending.cause
        return "ranks were killed, or their machine was lost"

    def _store_value(self, key: str, value: Any) -> None:
        if self._values is not None and not is_orphan():
            # Without the agent that hosts the store, there is no later attempt that would read it.
            with contextlib.suppress(dist.DistError):
                self._values.set(key, json.dumps(value))

    def _stored_value(self, key: str) -> Any:
        if self._values is None or not self._values.check([key]):
            return None
        return json.loads(self._values.get(key))


def _revealed(stored: Any, now: Any, current: Any, name: str = "") -> Any:
    """Return stored settings, with the secrets of the current ones in place of hidden ones.

    Args:
        stored: Settings in which secrets are hidden.
        now: The current settings, in which secrets are hidden.
        current: The current settings.
        name: Dotted name of the setting.
    """
    if stored == now:
        return current
    if isinstance(stored, Mapping) and isinstance(now, Mapping):
        parts = {key: (value, now.get(key), current.get(key)) for key, value in stored.items()}
        return {key: _revealed(*part, join(name, key)) for key, part in parts.items()}
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        items = enumerate(zip(stored, now, current, strict=True))
        return [_revealed(*item, f"{name}[{index}]") for index, item in items]
    problem = "it has changed since this job started, which does not store secrets; change it back"
    require(HIDDEN not in str(stored), name, stored, f"{problem}, or start a new job")
    return stored


def _last_step(directory: RunDirectory) -> int:
    """Return the last step with a record."""
    try:
        return max((record.step for record in read_records(directory.records)), default=0)
    except OSError:  # no file yet, or one that cannot be read, of which `RecordWriter` warns
        return 0
