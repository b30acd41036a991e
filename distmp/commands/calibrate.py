"""`distmp calibrate --config FILE`: train a few steps and measure gradients against float16.

Under torchrun (`torchrun -m distmp.commands.calibrate`) the counts are sums over all ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from distmp.config import RunConfig
from distmp.diagnosis.gradient_recorder import GradientRecorder
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import World, all_or_none, join, leave
from distmp.errors import ConfigError
from distmp.parallel.settings import ShardingConfig
from distmp.precision import PolicyLike, Resolution, policy, resolve
from distmp.telemetry.calibration import Calibration, as_json, report
from distmp.telemetry.gradient_ranges import draw_gradient_ranges
from distmp.training.setup import (
    Progress,
    build_engine,
    find_checkpoint,
    prepare,
    restore,
    start_from_weights,
    training_batches,
)
from distmp.training.train import end_process, run_as_rank
from distmp.utils.settings import command_line


@dataclass(frozen=True)
class CalibrationConfig(RunConfig):
    """A training run of which only a few steps are taken, and how they are reported."""

    calibrate_steps: int = 20
    """Steps to take."""

    json: bool = False
    """Print JSON instead of tables."""

    picture: str | None = "calibration.png"
    """PNG file for the histograms; null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibrate_steps < 1:
            raise ConfigError("calibrate_steps", self.calibrate_steps, "use 1 or more steps")
        if self.picture is not None and not Path(self.picture).absolute().parent.is_dir():
            raise ConfigError("picture", self.picture, "name a file in a folder that exists")


load = functools.partial(
    command_line,
    CalibrationConfig,
    prog="distmp calibrate",
    description="Train a few steps and compare gradients with the range of float16.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, and return the exit code of this rank, as `distmp.training.train.main` does."""
    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _calibrate)


def _calibrate(config: CalibrationConfig, environment: RankEnvironment) -> int:
    world = join(environment, timeout_seconds=60 * config.timeout_minutes)
    calibration = measure(config, world)
    if world.rank == 0:
        lines = report(calibration, config.precision.loss_scale)
        text = as_json(calibration) if config.json else "\n".join(lines)
        sys.stdout.write(text + "\n")
        if config.picture is not None:
            scale = calibration.total.recommended_scale()
            draw_gradient_ranges(calibration.histograms, scale, config.picture)
    leave()
    return 0


def measure(config: CalibrationConfig, world: World) -> Calibration:
    """Train for `calibrate_steps` and count gradients; every rank has to call it.

    Nothing is written, and nothing is left of the training.

    Raises:
        SetupError: On every rank, if some rank cannot do what is configured.
    """
    if world.group is None:
        config = _for_one_process(config)
    parts = all_or_none(world, lambda: prepare(config, world))
    checkpoint = all_or_none(world, lambda: find_checkpoint(config))
    if checkpoint is None:
        all_or_none(world, lambda: start_from_weights(config, parts.model))
    measured_in, reason = _policy(config.precision.policy, world.device)
    engine = all_or_none(
        world,
        lambda: build_engine(config, parts, world, policy=measured_in, attribution=False),
    )
    progress = Progress()
    if checkpoint is not None:
        progress = all_or_none(world, lambda: restore(engine, checkpoint))
    batches = training_batches(config, parts, world, progress)
    with closing(batches), GradientRecorder(engine.module, world.device) as recorder:
        for _ in range(config.calibrate_steps):
            engine.step(next(batches))
        histograms = recorder.histograms(world.group)
    told = f"{measured_in.name} ({reason})"
    return Calibration(config.calibrate_steps, world.world_size, told, histograms)


def _for_one_process(config: CalibrationConfig) -> CalibrationConfig:
    """Return a configuration for several ranks changed for one; gradients keep their range."""
    sharding = ShardingConfig(wrap=config.sharding.wrap)
    return replace(config, strategy="single", sharding=sharding, shard_optimizer=False)


def _policy(configured: PolicyLike, device: torch.device) -> Resolution:
    """Return the policy to measure with: one in which no gradient is scaled or overflows."""
    wanted, _ = resolve(configured, device)
    if wanted.loss_scale is None:
        return Resolution(wanted, "as configured; it has the exponents of float32")
    reason = f"in place of {wanted.name}, which would hide what it cannot hold"
    return Resolution(policy("fp32"), reason)


if __name__ == "__main__":
    end_process(main())
