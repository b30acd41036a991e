"""Settings of what a run reports about itself (section `log`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from distmp.errors import ConfigError, nearest

ConsoleMode = Literal["auto", "live", "plain", "off"]


@dataclass(frozen=True)
class LogConfig:
    """What the first rank prints and draws while training.

    Raises:
        ConfigError: If `every` is below 1, `ranks_every` below 0, `console` is not one of its
            choices, or a tracker is not there.
    """

    every: int = 10
    """Steps between two plain lines. First, last, skipped and validated steps always get one."""

    console: ConsoleMode = "auto"
    """`live`: one line redrawn in place; `plain`: a line every `every` steps; `off`: nothing.
    `auto` is `live` on a terminal and `plain` elsewhere."""

    files: bool = True
    """Copy what each rank writes into the run's folder `logs`, warnings of libraries included."""

    ranks_every: int = 50
    """Steps between two comparisons of the time that each rank takes by itself, so that a slow one
    is named; 0: none."""

    curves: bool = True
    """Draw loss, learning rate, gradient norm and loss scale into a PNG."""

    trackers: tuple[str, ...] = ()
    """Loggers that get the numbers of every step: tensorboard, wandb and whatever else accelerate
    knows, or the import path 'module:Class' of an accelerate.tracking.GeneralTracker."""

    tracker_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of loggers, by name: `wandb: {mode: offline}`."""

    project: str = "distmp"
    """Under which loggers file the run."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                "log.every", self.every, "use 1 or more; `log.console: off` prints nothing"
            )
        if self.ranks_every < 0:
            raise ConfigError("log.ranks_every", self.ranks_every, "use 0 or more steps")
        if self.console not in get_args(ConsoleMode):
            raise ConfigError(
                "log.console", self.console, nearest(str(self.console), get_args(ConsoleMode))
            )
        for name, options in self.tracker_options.items():
            setting = f"log.tracker_options.{name}"
            if name not in self.trackers:
                raise ConfigError(setting, options, "add it to log.trackers")
            if not isinstance(options, dict):
                raise ConfigError(setting, options, "must be a mapping of keyword arguments")
        for name in self.trackers:
            # Imported here: accelerate takes a second to import.
            from distmp.telemetry.trackers import find

            find(name)
