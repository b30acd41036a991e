"""Settings of `distmp calibrate`."""

from __future__ import annotations

from dataclasses import dataclass

from distmp.config import RunConfig
from distmp.errors import ConfigError

# The presets with low-precision matmuls, the cheapest first.
FORMATS = ("nvfp4", "fp8", "mxfp8", "fp8-rowwise")
# Above the typical errors with 8 bits, which are 0.01 to 0.07.
MAX_ERROR = 0.08
# Steps that compile, allocate and fill caches, which are not timed.
WARM_UP = 3
LEAST_SEEDS = 2


@dataclass(frozen=True)
class CalibrationConfig(RunConfig):
    """A training run that stops after a few steps under each policy, and the output."""

    calibrate_steps: int = 20
    """Steps under each policy, with the same batches and initial weights."""

    policies: tuple[str, ...] = ("fp32", "bf16", "fp16")
    """Policies to compare; the first one is the reference. A policy with a loss scale adds the
    range of gradients and a loss scale; fp8, fp8-rowwise, mxfp8 and nvfp4 add the errors of
    matmuls and a policy below `max_error`."""

    seeds: int = 0
    """Other seeds with which all policies are trained, too. A policy then agrees if the mean
    difference of its held-out loss and metrics from the reference is at most 2 standard deviations
    of the reference over seeds. 0 compares the training loss with `tolerance` only."""

    tolerance: float = 0.01
    """Largest accepted relative difference of a policy's last loss from the reference."""

    max_error: float = MAX_ERROR
    """Largest relative error of a matmul in the recommended format. Typical errors are 0.01 to 0.07
    with 8 bits, and 0.03 to 0.15 with nvfp4."""

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
        if self.seeds != 0 and self.seeds < LEAST_SEEDS:
            raise ConfigError(
                "seeds",
                self.seeds,
                f"use {LEAST_SEEDS} or more other seeds, because fewer losses have no meaningful "
                "standard deviation; 0 compares with tolerance only",
            )
        for name in ("tolerance", "max_error"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "use a number between 0 and 1")

    @property
    def formats(self) -> tuple[str, ...]:
        """The policies whose matmuls are measured, the cheapest first."""
        return tuple(name for name in FORMATS if name in self.policies)

    @property
    def compared_metrics(self) -> dict[str, str]:
        """The metrics of `validation.metrics`; accuracy if it is empty and tokens are predicted."""
        tokens = self.model.loss == "next_token" and not self.data.is_import_path
        return self.validation.metrics or ({"accuracy": "accuracy"} if tokens else {})

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
