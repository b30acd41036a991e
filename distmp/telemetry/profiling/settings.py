"""Which steps are recorded (section `profile`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distmp.errors import ConfigError

# A trace of more cannot be opened.
MOST_STEPS = 100


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps of a run are recorded.

    Raises:
        ConfigError: If `steps` is not a step or two of them, in order, or too many.
    """

    steps: int | str | None = None
    """First and last step to record, as in 20:25, or one step. What they did goes to the run's
    folder `profile`: for each rank a trace (for Perfetto) and what took memory, and a summary of
    where the time went; see docs/profiling.md."""

    def __post_init__(self) -> None:
        if self.steps is None:
            return
        first, last = self._parsed()
        if first < 1:
            raise ConfigError("profile.steps", self.steps, "steps are counted from 1")
        if last < first:
            raise ConfigError("profile.steps", self.steps, f"write {last}:{first}")
        if last - first >= MOST_STEPS:
            raise ConfigError(
                "profile.steps",
                self.steps,
                f"record at most {MOST_STEPS} steps; few are enough",
            )

    @property
    def window(self) -> range:
        """The steps to record, counted from 1; empty if there are none."""
        if self.steps is None:
            return range(0)
        first, last = self._parsed()
        return range(first, last + 1)

    def check(self, steps: int) -> None:
        """Refuse what lies behind the end of a run of so many steps.

        Raises:
            ConfigError: If a step to record does.
        """
        if self.window and self.window[-1] > steps:
            raise ConfigError("profile.steps", self.steps, f"the run ends with step {steps}")

    def _parsed(self) -> tuple[int, int]:
        found = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", str(self.steps).strip())
        if found is None:
            raise ConfigError(
                "profile.steps", self.steps, "write the first and the last step, as in 20:25"
            )
        return int(found[1]), int(found[2] or found[1])
