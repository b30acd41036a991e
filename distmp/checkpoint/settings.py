"""Settings of section `checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass

from distmp.errors import ConfigError


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay."""

    every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""

    keep: int = 2
    """Number of latest checkpoints that stay on disk."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError("checkpoint.every", self.every, "give a number of steps, or 0")
        if self.keep < 1:
            raise ConfigError("checkpoint.keep", self.keep, "keep at least 1 checkpoint")
