"""`distmp bench precision`: train a few steps of a run under each precision policy in turn.

Under torchrun (`torchrun -m distmp.commands.bench.precision`) it uses all ranks.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from distmp.commands.bench.comparison import Comparison, PolicyRefused, PolicyResult, draw, report
from distmp.config import RunConfig
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import World, join, leave
from distmp.errors import ConfigError, SetupError
from distmp.precision import policy, resolve
from distmp.telemetry.memory import begin_peak, peak_since
from distmp.training.setup import (
    Progress,
    build_engine,
    prepare,
    start_from_weights,
    training_batches,
)
from distmp.training.strategy_choice import choose_strategy
from distmp.training.train import end_process, run_as_rank
from distmp.utils.settings import command_line

# Steps that compile, allocate and fill caches, which are not timed.
WARM_UP = 3


@dataclass(frozen=True)
class BenchPrecisionConfig(RunConfig):
    """A training run to start under several policies."""

    bench_steps: int = 50
    """Steps under each policy, with the same batches and initial weights."""

    policies: tuple[str, ...] = ("fp32", "tf32", "bf16", "bf16-autocast", "fp16", "fp16-autocast")
    """Policies to compare; the first one is the reference."""

    tolerance: float = 0.01
    """Largest accepted relative difference of a policy's last loss from the reference."""

    json: bool = False
    """Print JSON instead of a table."""

    picture: str | None = "precision.png"
    """PNG file for loss, time and memory; null writes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bench_steps <= WARM_UP:
            raise ConfigError("bench_steps", self.bench_steps, f"use more than {WARM_UP} steps")
        if not self.policies:
            raise ConfigError("policies", self.policies, "name at least one")
        for name in self.policies:
            policy(name)
        if not 0 < self.tolerance < 1:
            raise ConfigError("tolerance", self.tolerance, "use a number between 0 and 1")
        if self.picture is not None and not Path(self.picture).absolute().parent.is_dir():
            raise ConfigError("picture", self.picture, "name a file in a folder that exists")


load = functools.partial(
    command_line,
    BenchPrecisionConfig,
    prog="distmp bench precision",
    description="Train a few steps under each precision policy and compare.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the policies, and return the exit code of this rank."""
    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _bench)


def _bench(config: BenchPrecisionConfig, environment: RankEnvironment) -> int:
    world = join(environment, timeout_seconds=60 * config.timeout_minutes)
    compared = compare(config, world)
    if world.rank == 0:
        text = json.dumps(compared.as_json(), indent=2) if config.json else report(compared)
        sys.stdout.write(text + "\n")
        if config.picture is not None:
            draw(compared, config.picture)
    leave()
    return 0


def compare(config: BenchPrecisionConfig, world: World) -> Comparison:
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
    results = {
        name: measure(config, world, name, steps=config.bench_steps) for name in config.policies
    }
    return Comparison(config.bench_steps, world.world_size, config.tolerance, results)


def measure(
    config: BenchPrecisionConfig, world: World, name: str, *, steps: int
) -> PolicyResult | PolicyRefused:
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
        return PolicyRefused(str(error))
    start_from_weights(parts, engine)
    losses, seconds, skipped = [], [], 0
    with closing(training_batches(config, parts, world, Progress())) as batches:
        for _ in range(steps):
            microbatches = next(batches)
            torch.manual_seed(config.seed)
            started = time.perf_counter()
            numbers = engine.step(microbatches).numbers
            seconds.append(time.perf_counter() - started)
            losses.append(numbers.loss)
            skipped += numbers.skipped
    memory = torch.tensor(peak_since(start, world.device), dtype=torch.float64, device=world.device)
    if world.group is not None:
        torch.distributed.all_reduce(memory, torch.distributed.ReduceOp.MAX, world.group)
    _, reason = resolve(name, world.device)
    return PolicyResult(reason, tuple(losses), tuple(seconds[WARM_UP:]), int(memory), skipped)


if __name__ == "__main__":
    end_process(main())
