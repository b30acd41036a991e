"""Trains a few steps of a run under each precision policy in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import torch

from distmp.commands.calibrate.comparison import Comparison, PolicyResult
from distmp.commands.calibrate.seeds import SeedComparison
from distmp.commands.calibrate.settings import WARM_UP, CalibrationConfig
from distmp.data.evaluation import evaluation_batches
from distmp.distributed.world import World
from distmp.engine import Engine
from distmp.errors import ConfigError, SetupError
from distmp.models.metrics import find_metric
from distmp.precision import resolve
from distmp.telemetry.memory import begin_peak, peak_since
from distmp.training.setup import (
    Progress,
    RunComponents,
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
    seeds = _over_seeds(config, world, results) if config.seeds else None
    return Comparison(steps, world.world_size, config.tolerance, results, seeds)


def _over_seeds(
    config: CalibrationConfig, world: World, results: Mapping[str, PolicyResult | str]
) -> SeedComparison:
    """Train each policy that ran with further seeds: other initial weights and data orders."""
    values: dict[str, dict[str, list[float]]] = {}
    for name, first in results.items():
        if isinstance(first, str):
            continue
        values[name] = {what: [value] for what, value in first.held_out.items()}
        for seed in range(config.seed + 1, config.seed + config.seeds):
            again = measure(replace(config, seed=seed), world, name, steps=config.calibrate_steps)
            assert isinstance(again, PolicyResult)  # it was not refused with the first seed
            for what, value in again.held_out.items():
                values[name][what].append(value)
    return SeedComparison(values)


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
    held_out = _held_out(config, parts, engine) if config.seeds else {}
    return PolicyResult(
        reason, tuple(losses), tuple(seconds[WARM_UP:]), int(memory), skipped, held_out
    )


def _held_out(config: CalibrationConfig, parts: RunComponents, engine: Engine) -> dict[str, float]:
    """Return loss and metrics on held-out samples, the same under every policy and seed."""
    if parts.datasets.validation is None:
        raise ConfigError("seeds", config.seeds, "needs held-out samples; set data.held_out")
    batches = evaluation_batches(
        parts.datasets.validation,
        samples=config.validation.samples,
        microbatch_size=config.batch.microbatch_size,
        rank=engine.world.rank,
        world_size=engine.world.world_size,
    )
    found = {name: find_metric(name, path) for name, path in config.compared_metrics.items()}
    # Perplexity follows from the loss.
    metrics = {name: metric for name, metric in found.items() if metric is not None}
    loss, values = engine.evaluate_metrics(batches, metrics)
    return {"loss": loss, **values}
