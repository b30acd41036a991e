"""Settings of `distmp calibrate`."""

from __future__ import annotations

from dataclasses import dataclass

from distmp.config import RunConfig

# Steps that compile, allocate and fill caches, which are not timed.
WARM_UP = 3
# Fewer values have no meaningful standard deviation.
LEAST_SEEDS = 3


@dataclass(frozen=True)
class CalibrationConfig(RunConfig):
    """A training run that stops after a few steps under each policy, and the output."""

    prog = "distmp calibrate"
    description = (
        "Train a few steps under each precision policy and compare: loss, time and memory; the "
        "loss scale of float16."
    )

    calibrate_steps: int = 20
    """Steps under each policy, with the same batches and initial weights."""

    policies: tuple[str, ...] = ("fp32", "bf16", "fp16")
    """Policies to compare; the first one is the reference. A policy with a loss scale adds the
    range of gradients and a loss scale."""

    seeds: int = 0
    """Seeds with which each policy is trained, 3 or more. A policy then agrees if the mean
    difference of its held-out loss and metrics from the reference is at most 2 standard deviations
    of the reference over seeds. 0 compares the training loss with `tolerance` only."""

    tolerance: float = 0.01
    """Largest accepted relative difference of a policy's last loss from the reference."""

    json: bool = False
    """Print JSON instead of tables."""

    def _check(self) -> None:
        super()._check()
        hint = f"use more than {WARM_UP} steps"
        self._require(self.calibrate_steps > WARM_UP, "calibrate_steps", hint)
        object.__setattr__(self, "policies", _split(self.policies))
        self._require(len(self.policies) > 0, "policies", "name at least one")
        hint = (
            f"use {LEAST_SEEDS} or more seeds, because fewer values have no meaningful standard "
            "deviation; 0 compares with tolerance only"
        )
        self._require(self.seeds == 0 or self.seeds >= LEAST_SEEDS, "seeds", hint)
        self._require(0 < self.tolerance < 1, "tolerance", "use a number between 0 and 1")

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
