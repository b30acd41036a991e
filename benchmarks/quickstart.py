"""Tokens per second of the quickstart, compared with a plain torch DDP loop.

`python -m benchmarks.quickstart` starts two CPU ranks over gloo (or one rank per GPU over NCCL).
The two loops take turns in the same processes, in FP32, with the same model, data, batch and
optimizer. One is distmp's trainer with its records; the other is a minimal hand-written loop, which
reads its loss every ten steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ranks import elapsed_together
from benchmarks.report import Spread, alternating, machine, save
from benchmarks.tables import steps
from distmp.config import RunConfig, load
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World, join, leave
from distmp.engine.setup import build_model
from distmp.launcher.local import launch
from distmp.optim.factories import schedule_factory, weight_decay_groups
from distmp.parallel.materialize import materialize
from distmp.telemetry.console import Console
from distmp.telemetry.settings import LogConfig
from distmp.training.components import Progress, build_model_and_data, training_batches
from distmp.training.trainer import Trainer

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def main() -> int:
    arguments = _arguments()
    if not arguments.rank:
        return launch([], "benchmarks.quickstart", ["--rank", *sys.argv[1:]])
    world = join(RankEnvironment.from_variables(), timeout_seconds=300)
    with tempfile.TemporaryDirectory() as directory:
        config = _config(arguments.steps, directory)
        seconds: dict[str, list[float]] = {"distmp": [], "plain": []}
        for name, counts in alternating(list(seconds), arguments.rounds, warm_up=1):
            measured = (_distmp if name == "distmp" else _plain)(config, world)
            if counts:
                seconds[name].append(measured)
    if world.rank == 0:
        _report(config, world, seconds)
    leave()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps in a turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each loop")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _config(steps: int, directory: str) -> RunConfig:
    config = load(["--config", str(QUICKSTART)])
    return replace(
        config,
        steps=steps,
        # As the hand-written loop; "auto" selects bf16 on some CPUs.
        precision=replace(config.precision, policy="fp32"),
        run_dir=f"{directory}/run",
        schedule=replace(config.schedule, warmup_steps=steps // 3),
        data=replace(config.data, held_out=0.0),  # no validation
        validation=replace(config.validation, every=0),
        log=LogConfig(console="off"),
    )


def _distmp(config: RunConfig, world: World) -> float:
    """Return the time of all steps with distmp's trainer, in seconds."""
    trainer = Trainer(config, world, Console(config.log, quiet=True))
    with StopSignals() as stop, trainer.active(stop):
        return elapsed_together(trainer.train, world.device)


def _plain(config: RunConfig, world: World) -> float:
    """Return the time of all steps with the hand-written loop, in seconds."""
    parts = build_model_and_data(config, world)
    module, values, _ = build_model(parts.model, world, initialize=True)
    materialize(module, values, world.device)
    model = DistributedDataParallel(module.to(world.device))
    optimizer = torch.optim.AdamW(
        weight_decay_groups(list(model.named_parameters()), config.optim.weight_decay),
        lr=config.optim.lr,
        fused=True,
        **config.optim.options,
    )
    scheduler = schedule_factory(config.schedule, config.steps)(optimizer)
    batches = training_batches(config, parts, world, Progress())

    def train() -> None:
        losses = []
        for step in range(config.steps):
            microbatches = next(batches).microbatches
            for index, batch in enumerate(microbatches):
                model.require_backward_grad_sync = index == len(microbatches) - 1
                inputs, targets = (
                    batch["inputs"].to(world.device),
                    batch["targets"].to(world.device),
                )
                logits = model(inputs)
                loss = cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(microbatches)
                loss.backward()
            if config.optim.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                losses.append(loss.item())

    return elapsed_together(train, world.device)


def _report(config: RunConfig, world: World, seconds: dict[str, list[float]]) -> None:
    tokens = config.steps * config.batch.global_batch_size * config.data.sequence_length
    ratios = [plain / ours for ours, plain in zip(seconds["distmp"], seconds["plain"], strict=True)]
    result = {
        "machine": machine(),
        "ranks": world.world_size,
        "steps_per_turn": config.steps,
        "seconds": seconds,
        "tokens_per_second": {
            name: Spread.of([tokens / turn for turn in turns]) for name, turns in seconds.items()
        },
        "tokens_per_second_of_plain_ddp": Spread.of(ratios),
    }
    print(steps.quickstart(result))
    print(f"saved to {save(f'quickstart-{world.device.type}', result)}")


if __name__ == "__main__":
    sys.exit(main())
