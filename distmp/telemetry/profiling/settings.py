"""Settings of the profiler (section `profile`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distmp.errors import ConfigError

# A trace of more steps is too large to open.
MAX_STEPS = 100


@dataclass(frozen=True)
class ProfileConfig:
    """The steps of a run to record.

    Raises:
        ConfigError: If `steps` is not a step or an ascending range, or contains too many steps.
    """

    steps: int | str | None = None
    """First and last step to record, as in 20:25, or one step. The run's folder `profile` gets a
    trace (for Perfetto) and the memory use of each rank, and a summary of where the time went; see
    docs/profiling.md."""

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
