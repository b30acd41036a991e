"""The components of a training run in their state before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distmp.checkpoint.store import StoredCheckpoint
from distmp.config import RunConfig
from distmp.distributed.world import World
from distmp.engine import Engine
from distmp.telemetry.console import Console
from distmp.training.components import Progress, RunComponents
from distmp.training.restarts import Restarts
from distmp.training.run_directory import RunDirectory
from distmp.training.run_lease import RunLease


@dataclass(frozen=True)
class Run:
    """The components of a training run on one rank, as `build_run` returns them.

    Attributes:
        config: The configuration.
        world: The ranks.
        console: Prints messages; quiet on all ranks but the first.
        components: Data, loss, and the model before it was distributed.
        engine: Takes the optimizer steps. The state of the checkpoint, if any, has been loaded.
        fingerprint: Properties of the run that a checkpoint stores, see `run_fingerprint`.
        directory: The directory of the run.
        restarts: Earlier attempts of this job.
        checkpoint: The checkpoint that was loaded; None for a new run.
        progress: Steps and samples up to now.
        lease: On rank 0, the right to write to the directory; None on the others.
    """

    config: RunConfig
    world: World
    console: Console
    components: RunComponents
    engine: Engine
    fingerprint: dict[str, Any]
    directory: RunDirectory
    restarts: Restarts
    checkpoint: StoredCheckpoint | None
    progress: Progress
    lease: RunLease | None
