"""Settings of section `checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass

from distmp.checkpoint.retention import Retention
from distmp.errors import ConfigError


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = 0
    """Steps between checkpoints; 0 writes one only at the end."""

    asynchronous: bool = True
    """Continue training while a checkpoint is written; takes host memory for a copy of the state
    that the rank writes."""

    keep: int = 2
    """Number of latest checkpoints to keep."""

    keep_every: int = 0
    """Permanently keep the first checkpoint of each interval of so many steps; 0 disables this."""

    path: str | None = None
    """Parent folder of the checkpoint folder, which has the name of the run's folder. null: in the
    run's folder."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError("checkpoint.every", self.every, "give a number of steps, or 0")
        if self.keep < 1:
            raise ConfigError("checkpoint.keep", self.keep, "keep at least 1 checkpoint")
        if self.keep_every < 0:
            problem = "give a number of steps, or 0"
            raise ConfigError("checkpoint.keep_every", self.keep_every, problem)
        if self.path == "":
            raise ConfigError("checkpoint.path", self.path, "give a path, or null")

    @property
    def retention(self) -> Retention:
        """The rules that select the checkpoints to keep."""
        return Retention(self.keep, self.keep_every)
