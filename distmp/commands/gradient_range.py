"""Counts the gradients of a few steps by their magnitude, for `distmp calibrate`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch

from distmp.config import RunConfig
from distmp.diagnosis.gradient_recorder import GradientRecorder
from distmp.distributed.world import World
from distmp.parallel.settings import ShardingConfig
from distmp.precision import PolicyLike, Resolution, policy, resolve
from distmp.telemetry.calibration import Calibration
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


def measure(config: RunConfig, world: World, steps: int) -> Calibration:
    """Train for some steps and count gradients; every rank must call it.

    Writes no files and keeps no state of the training.

    Raises:
        SetupError: On every rank, if a rank cannot use the configuration.
    """
    if world.group is None:
        config = for_one_process(config)
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
        for _ in range(steps):
            engine.step(next(batches))
        histograms = recorder.histograms(world.group)
    description = f"{measured_in.name} ({reason})"
    return Calibration(steps, world.world_size, description, histograms)


def for_one_process(config: RunConfig) -> RunConfig:
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
