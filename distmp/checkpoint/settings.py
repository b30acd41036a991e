"""Settings of section `checkpoint`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from distmp.errors import ConfigError


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay."""

    every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""

    every_minutes: float = 0.0
    """Minutes between checkpoints, by the clock of the first rank; 0 leaves it to `every`."""

    asynchronous: bool = True
    """Go on training while a checkpoint is written; takes host memory for what a rank writes."""

    on_failure: Literal["continue", "stop"] = "continue"
    """Whether a run whose checkpoint could not be written goes on, or ends with an error."""

    keep: int = 2
    """Number of latest checkpoints that stay on disk."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError("checkpoint.every", self.every, "give a number of steps, or 0")
        if not (math.isfinite(self.every_minutes) and self.every_minutes >= 0):
            raise ConfigError(
                "checkpoint.every_minutes", self.every_minutes, "give a number of minutes, or 0"
            )
        if self.on_failure not in ("continue", "stop"):
            raise ConfigError("checkpoint.on_failure", self.on_failure, "use continue or stop")
        if self.keep < 1:
            raise ConfigError("checkpoint.keep", self.keep, "keep at least 1 checkpoint")
