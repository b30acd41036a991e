"""Settings of logging and of the profiler (sections `log` and `profile`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from distmp.errors import ConfigError
from distmp.utils.annotations import Section
from distmp.utils.imports import parse_entries

# A trace of more steps is too large to open.
MAX_STEPS = 100


@dataclass(frozen=True)
class LogConfig(Section, section="log"):
    """Output of the first rank during training.

    Raises:
        ConfigError: If `every` is below 1, or a tracker does not exist or is named twice.
    """

    every: int = 10
    """Steps between two lines. First, last, skipped and validated steps always print one."""

    console: Literal["plain", "off"] = "plain"
    """`plain` prints messages and lines about steps, `off` prints nothing."""

    trackers: tuple[str | dict[str, Any], ...] = ()
    """Trackers that log every step: tensorboard, wandb and others that accelerate supports, or the
    import path 'module:Class' of an accelerate.tracking.GeneralTracker. With arguments:
    '{name: wandb, options: {project: first, mode: offline}}'."""

    def _check(self) -> None:
        self._require(self.every >= 1, "every", "use 1 or more; `log.console: off` prints nothing")
        once = len(self.tracker_options) == len(self.trackers)
        self._require(once, "trackers", "name each tracker once")
        for name in self.tracker_options:
            # Imported late: accelerate takes a second to import.
            from distmp.telemetry.trackers import find

            find(name)

    @property
    def tracker_options(self) -> dict[str, dict[str, Any]]:
        """The arguments of all trackers, by name.

        Raises:
            ConfigError: If an entry has other keys than `name` and `options`, or values of other
                types.
        """
        return {each.name: each.options for each in parse_entries("log.trackers", self.trackers)}


@dataclass(frozen=True)
class ProfileConfig(Section, section="profile"):
    """The steps of a run to record.

    Raises:
        ConfigError: If `steps` is not a step or an ascending range, or contains too many steps.
    """

    steps: int | str | None = None
    """First and last step to record, as in 20:25, or one step. The directory `profile` of the run
    gets a trace (for Perfetto) and a table of operators of each rank, and the exposed communication
    of all ranks; see the page "Profile a run"."""

    def _check(self) -> None:
        if self.steps is None:
            return
        first, last = self.window.start, self.window.stop - 1
        self._require(first >= 1, "steps", "steps are counted from 1")
        self._require(last >= first, "steps", f"write {last}:{first}")
        hint = f"record at most {MAX_STEPS} steps; a few are enough"
        self._require(last - first < MAX_STEPS, "steps", hint)

    @property
    def window(self) -> range:
        """The steps to record, counted from 1; empty without a profile."""
        if self.steps is None:
            return range(0)
        match = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", str(self.steps).strip())
        if match is None:
            hint = "write the first and the last step, as in 20:25"
            raise ConfigError("profile.steps", self.steps, hint)
        return range(int(match[1]), int(match[2] or match[1]) + 1)

    def check(self, steps: int) -> None:
        """Check that a run of `steps` steps reaches all steps to record.

        Raises:
            ConfigError: If it does not.
        """
        reached = not self.window or self.window[-1] <= steps
        self._require(reached, "steps", f"the run ends with step {steps}")
