"""Settings of logging (section `log`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from distmp.errors import ConfigError, nearest

ConsoleMode = Literal["auto", "live", "plain", "off"]


@dataclass(frozen=True)
class LogConfig:
    """Output of the first rank during training.

    Raises:
        ConfigError: If `every` is below 1, `ranks_every` or `grad_norms_every` below 0, `console`
            is not one of its choices, or a tracker does not exist.
    """

    every: int = 10
    """Steps between two plain lines. First, last, skipped and validated steps always print one."""

    console: ConsoleMode = "auto"
    """`live` redraws one line in place, `plain` prints a line every `every` steps, `off` prints
    nothing. `auto` is `live` on a terminal and `plain` elsewhere."""

    files: bool = True
    """Copy the output of each rank to the folder `logs` of the run, including library warnings."""

    ranks_every: int = 50
    """Steps between two comparisons of the ranks' step times without waiting. A comparison reports
    slow ranks; 0 disables it."""

    grad_norms_every: int = 0
    """Steps between two measurements of the gradient norm of each layer, before clipping, for the
    records and trackers; 0 disables them."""

    trackers: tuple[str, ...] = ()
    """Trackers that log every step: tensorboard, wandb and others that accelerate supports, or the
    import path 'module:Class' of an accelerate.tracking.GeneralTracker."""

    tracker_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of trackers, by name: `wandb: {mode: offline}`."""

    project: str = "distmp"
    """Project name for the trackers."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                "log.every", self.every, "use 1 or more; `log.console: off` prints nothing"
            )
        for name in ("ranks_every", "grad_norms_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"log.{name}", getattr(self, name), "use 0 or more steps")
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
            # Imported late: accelerate takes a second to import.
            from distmp.telemetry.trackers import find

            find(name)
