"""`distmp calibrate --config FILE`: compare precision policies on a few steps of a run.

Under torchrun (`torchrun -m distmp.commands.calibrate.command`) it uses all ranks.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distmp.config import RunConfig, load_as
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import ConfigError
from distmp.parallel.settings import ShardingConfig
from distmp.training.train import end_process, run_as_rank

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


load = functools.partial(
    load_as,
    CalibrationConfig,
    prog="distmp calibrate",
    description="Train a few steps under each precision policy and compare: loss, time and memory; "
    "the loss scale of float16; the errors of matmuls with 8 and 4 bits.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, and return the exit code of this rank."""
    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _calibrate)


def _calibrate(config: CalibrationConfig, environment: RankEnvironment) -> int:
    # Imported late: the help and errors in settings do not wait for torch.
    from distmp.commands.calibrate import comparison, format_report, formats, loss_scale, policies
    from distmp.distributed.world import join, leave
    from distmp.precision import resolve

    world = join(environment, timeout_seconds=60 * config.timeout_minutes)
    config = config.with_fixed_formats()
    if world.group is None:
        config = _for_one_process(config)
    content: dict[str, Any] = {}
    text: list[str] = []
    if any(resolve(name, world.device)[0].loss_scale is not None for name in config.policies):
        gradients = loss_scale.measure(config, world, config.calibrate_steps)
        content["gradients"] = loss_scale.as_json(gradients)
        text += [*loss_scale.report(gradients, config.precision.loss_scale), ""]
    if config.formats:
        found = formats.measure(config, world, config.calibrate_steps, config.formats)
        content["formats"] = format_report.as_json(found, config.max_error)
        text += [*format_report.report(found, config.max_error), ""]
    compared = policies.compare(config, world)
    if world.rank == 0:
        content |= compared.as_json()
        text.append(comparison.report(compared))
        sys.stdout.write((json.dumps(content, indent=2) if config.json else "\n".join(text)) + "\n")
    leave()
    return 0


def _for_one_process(config: CalibrationConfig) -> CalibrationConfig:
    """Adapt a configuration for several ranks to one rank."""
    sharding = ShardingConfig(wrap=config.sharding.wrap)
    return replace(config, strategy="single", sharding=sharding, shard_optimizer=False)


if __name__ == "__main__":
    end_process(main())
