"""Trains a few steps of a run under each precision policy in turn."""

from __future__ import annotations

import time
from contextlib import closing

import torch

from distmp.commands.calibrate.comparison import Comparison, PolicyResult
from distmp.commands.calibrate.settings import WARM_UP, CalibrationConfig
from distmp.distributed.world import World
from distmp.errors import SetupError
from distmp.precision import resolve
from distmp.telemetry.memory import begin_peak, peak_since
from distmp.training.setup import (
    Progress,
    build_engine,
    prepare,
    start_from_weights,
    training_batches,
)
from distmp.training.strategy_choice import choose_strategy


def compare(config: CalibrationConfig, world: World) -> Comparison:
    """Train under each policy in turn; every rank must call it. Writes no files.

    Raises:
        SetupError: On every rank, if the run cannot start under any policy.
    """
    # Once, so that all policies are measured with the strategy of the run.
    parts = world.ranks.all_or_none(lambda: prepare(config, world))
    config, _ = choose_strategy(config, parts, world)
    del parts
    for name in config.policies:
        # The first use of each dtype loads libraries and kernels, which stay in memory.
        measure(config, world, name, steps=1)
    steps = config.calibrate_steps
    results = {name: measure(config, world, name, steps=steps) for name in config.policies}
    return Comparison(steps, world.world_size, config.tolerance, results)


def measure(
    config: CalibrationConfig, world: World, name: str, *, steps: int
) -> PolicyResult | str:
    """Train under one policy; every rank must call it.

    Returns:
        Time, memory and losses, or why the run cannot use the policy.
    """
    parts = world.ranks.all_or_none(lambda: prepare(config, world))
    start = begin_peak(world.device)
    try:
        engine = world.ranks.all_or_none(
            lambda: build_engine(config, parts, world, policy=name, attribution=False),
        )
    except SetupError as error:
        return str(error)
    start_from_weights(parts, engine)
    losses, seconds, skipped = [], [], 0
    with closing(training_batches(config, parts, world, Progress())) as batches:
        for _ in range(steps):
            microbatches = next(batches)
            torch.manual_seed(config.seed)
            begin = time.perf_counter()
            numbers = engine.step(microbatches).numbers
            seconds.append(time.perf_counter() - begin)
            losses.append(numbers.loss)
            skipped += numbers.skipped
    memory = torch.tensor(peak_since(start, world.device), dtype=torch.float64, device=world.device)
    if world.group is not None:
        torch.distributed.all_reduce(memory, torch.distributed.ReduceOp.MAX, world.group)
    _, reason = resolve(name, world.device)
    return PolicyResult(reason, tuple(losses), tuple(seconds[WARM_UP:]), int(memory), skipped)
