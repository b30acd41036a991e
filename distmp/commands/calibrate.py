"""`distmp calibrate --config FILE`: compare gradients of a few steps with the range of float16.

Under torchrun (`torchrun -m distmp.commands.calibrate`) the counts are summed over all ranks.
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
from distmp.distributed.world import World, join, leave
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
from distmp.training.strategy_choice import choose_strategy
from distmp.training.train import end_process, run_as_rank
from distmp.utils.settings import command_line


@dataclass(frozen=True)
class CalibrationConfig(RunConfig):
    """A training run that stops after a few steps, and the output."""

    calibrate_steps: int = 20
    """Number of training steps."""

    json: bool = False
    """Print JSON instead of tables."""

    picture: str | None = "calibration.png"
    """PNG file for the histograms; null writes none."""

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
    """Calibrate, and return the exit code of this rank."""
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
    """Train for `calibrate_steps` and count gradients; every rank must call it.

    Writes no files and keeps no state of the training.

    Raises:
        SetupError: On every rank, if a rank cannot use the configuration.
    """
    if world.group is None:
        config = _for_one_process(config)
    parts = world.ranks.all_or_none(lambda: prepare(config, world))
    checkpoint = world.ranks.all_or_none(lambda: find_checkpoint(config))
    config, _ = choose_strategy(config, parts, world)
    measured_in, reason = _policy(config.precision.policy, world.device)
    engine = world.ranks.all_or_none(
        lambda: build_engine(
            config,
            parts,
            world,
            policy=measured_in,
            attribution=False,
            load=checkpoint is not None,
        )
    )
    progress = Progress()
    if checkpoint is None:
        start_from_weights(parts, engine)
    else:
        progress = world.ranks.all_or_none(lambda: restore(engine, checkpoint))
    batches = training_batches(config, parts, world, progress)
    with closing(batches), GradientRecorder(engine.module, world.device) as recorder:
        for _ in range(config.calibrate_steps):
            engine.step(next(batches))
        histograms = recorder.histograms(world.group)
    description = f"{measured_in.name} ({reason})"
    return Calibration(config.calibrate_steps, world.world_size, description, histograms)


def _for_one_process(config: CalibrationConfig) -> CalibrationConfig:
    """Adapt a configuration for several ranks to one rank; gradients keep their range."""
    sharding = ShardingConfig(wrap=config.sharding.wrap)
    return replace(config, strategy="single", sharding=sharding, shard_optimizer=False)


def _policy(configured: PolicyLike, device: torch.device) -> Resolution:
    """Return a policy for the measurement without loss scaling or overflows."""
    resolved, _ = resolve(configured, device)
    if resolved.loss_scale is None:
        return Resolution(resolved, "as configured; it has the exponent range of float32")
    reason = f"in place of {resolved.name}, whose range would hide values outside of it"
    return Resolution(policy("fp32"), reason)


if __name__ == "__main__":
    end_process(main())
