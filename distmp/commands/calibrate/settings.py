"""Settings of `distmp calibrate`."""

from __future__ import annotations

from dataclasses import dataclass

from distmp.config import RunConfig
from distmp.errors import ConfigError

# Steps that compile, allocate and fill caches, which are not timed.
WARM_UP = 3


@dataclass(frozen=True)
class CalibrationConfig(RunConfig):
    """A training run that stops after a few steps under each policy, and the output."""

    calibrate_steps: int = 20
    """Steps under each policy, with the same batches and initial weights."""

    policies: tuple[str, ...] = ("fp32", "bf16", "fp16")
    """Policies to compare; the first one is the reference. A policy with a loss scale adds the
    range of gradients and a loss scale."""

    tolerance: float = 0.01
    """Largest accepted relative difference of a policy's last loss from the reference."""

    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibrate_steps <= WARM_UP:
            raise ConfigError(
                "calibrate_steps", self.calibrate_steps, f"use more than {WARM_UP} steps"
            )
        object.__setattr__(self, "policies", _split(self.policies))
        if not self.policies:
            raise ConfigError("policies", self.policies, "name at least one")
        if not 0 < self.tolerance < 1:
            raise ConfigError("tolerance", self.tolerance, "use a number between 0 and 1")

    def check_names(self) -> None:
        """Look up what the settings name, and the policies."""
        super().check_names()
        from distmp.precision import policy

        for name in self.policies:
            policy(name)


def _split(policies: tuple[str, ...]) -> tuple[str, ...]:
    """Split `bf16,fp8`; the text of a policy, such as `bf16,reduce=bf16`, has a `=`."""
    names = [
        name
        for text in policies
        for name in ([text] if "=" in text else [word.strip() for word in text.split(",")])
    ]
    return tuple(dict.fromkeys(names))
