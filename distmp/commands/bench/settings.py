"""Settings of `distmp bench precision`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distmp.config import RunConfig
from distmp.errors import ConfigError

# Steps that compile, allocate and fill caches, which are not timed.
WARM_UP = 3
LEAST_SEEDS = 2


@dataclass(frozen=True)
class BenchPrecisionConfig(RunConfig):
    """A training run to start under several policies."""

    bench_steps: int = 50
    """Steps under each policy, with the same batches and initial weights."""

    policies: tuple[str, ...] = ("fp32", "tf32", "bf16", "bf16-autocast", "fp16", "fp16-autocast")
    """Policies to compare; the first one is the reference."""

    seeds: int = 0
    """Other seeds with which all policies are trained, too. A policy then agrees if the mean
    difference of its held-out loss and metrics from the reference is at most 2 standard deviations
    of the reference over seeds. 0 compares the training loss with `tolerance` only."""

    tolerance: float = 0.01
    """Largest accepted relative difference of a policy's last loss from the reference."""

    json: bool = False
    """Print JSON instead of a table."""

    picture: str | None = None
    """PNG file for loss, time and memory; null writes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bench_steps <= WARM_UP:
            raise ConfigError("bench_steps", self.bench_steps, f"use more than {WARM_UP} steps")
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
        if not 0 < self.tolerance < 1:
            raise ConfigError("tolerance", self.tolerance, "use a number between 0 and 1")
        if self.picture is not None and not Path(self.picture).absolute().parent.is_dir():
            raise ConfigError("picture", self.picture, "name a file in a folder that exists")

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
