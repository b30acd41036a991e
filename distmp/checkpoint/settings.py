"""Settings of section `checkpoint`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distmp.checkpoint.retention import Retention
from distmp.errors import ConfigError


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = 0
    """Steps between checkpoints; 0 writes one only at the end."""

    every_minutes: float = 0.0
    """Minutes between checkpoints, by the clock of rank 0; 0 disables saving by time."""

    asynchronous: bool = True
    """Continue training while a checkpoint is written; takes host memory for a copy of the state
    that the rank writes."""

    keep: int = 2
    """Number of latest checkpoints to keep."""

    keep_every: int = 0
    """Permanently keep the first checkpoint of each interval of so many steps; 0 disables this."""

    max_gib: float | None = None
    """Maximum total size of the checkpoints in GiB. Those that were set aside are removed first,
    then the oldest; the latest and the permanent ones are never removed. null: no limit."""

    path: str | None = None
    """Parent folder of the checkpoint folder, which has the name of the run's folder: a path, or a
    URL for fsspec such as s3://bucket/folder. null: in the run's folder."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError("checkpoint.every", self.every, "give a number of steps, or 0")
        if not (math.isfinite(self.every_minutes) and self.every_minutes >= 0):
            raise ConfigError(
                "checkpoint.every_minutes", self.every_minutes, "give a number of minutes, or 0"
            )
        if self.keep < 1:
            raise ConfigError("checkpoint.keep", self.keep, "keep at least 1 checkpoint")
        if self.keep_every < 0:
            problem = "give a number of steps, or 0"
            raise ConfigError("checkpoint.keep_every", self.keep_every, problem)
        if self.max_gib is not None and not 0 < self.max_gib < math.inf:
            problem = "give a number above 0, or null"
            raise ConfigError("checkpoint.max_gib", self.max_gib, problem)
        if self.path == "":
            raise ConfigError("checkpoint.path", self.path, "give a path, a URL, or null")

    @property
    def retention(self) -> Retention:
        """The rules that select the checkpoints to keep."""
        max_bytes = None if self.max_gib is None else int(self.max_gib * 2**30)
        return Retention(self.keep, self.keep_every, max_bytes)
