"""Settings of logging and of the profiler (sections `log` and `profile`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from distmp.errors import ConfigError, nearest

ConsoleMode = Literal["auto", "live", "plain", "off"]

# A trace of more steps is too large to open.
MAX_STEPS = 100


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


@dataclass(frozen=True)
class ProfileConfig:
    """The steps of a run to record.

    Raises:
        ConfigError: If `steps` is not a step or an ascending range, or contains too many steps.
    """

    steps: int | str | None = None
    """First and last step to record, as in 20:25, or one step. The directory `profile` of the run
    gets a trace (for Perfetto) and a table of operators of each rank, and the exposed communication
    of all ranks; see docs/profiling.md."""

    def __post_init__(self) -> None:
        if self.steps is None:
            return
        first, last = self._parsed()
        if first < 1:
            raise ConfigError("profile.steps", self.steps, "steps are counted from 1")
        if last < first:
            raise ConfigError("profile.steps", self.steps, f"write {last}:{first}")
        if last - first >= MAX_STEPS:
            raise ConfigError(
                "profile.steps",
                self.steps,
                f"record at most {MAX_STEPS} steps; a few are enough",
            )

    @property
    def window(self) -> range:
        """The steps to record, counted from 1; empty without a profile."""
        if self.steps is None:
            return range(0)
        first, last = self._parsed()
        return range(first, last + 1)

    def check(self, steps: int) -> None:
        """Check that a run of `steps` steps reaches all steps to record.

        Raises:
            ConfigError: If it does not.
        """
        if self.window and self.window[-1] > steps:
            raise ConfigError("profile.steps", self.steps, f"the run ends with step {steps}")

    def _parsed(self) -> tuple[int, int]:
        match = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", str(self.steps).strip())
        if match is None:
            raise ConfigError(
                "profile.steps", self.steps, "write the first and the last step, as in 20:25"
            )
        return int(match[1]), int(match[2] or match[1])
