"""A small regression for runs of the trainer, and trainers of any configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from distmp.config import RunConfig
from distmp.data.order import sample_indices
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.telemetry.console import Console
from distmp.training.callbacks import Callback
from distmp.training.trainer import Trainer

BATCH, SAMPLES, SEED, STEPS = 8, 160, 3, 14


class Points:
    """Points of a plane; targets at some positions of the first epoch are replaced."""

    draws_nothing = True

    def __init__(self, replaced: Mapping[int, float]) -> None:
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self.targets = self.inputs.sum(1, keepdim=True)
        order = sample_indices(SEED, 0, SAMPLES, SAMPLES)
        for position, value in replaced.items():
            self.targets[int(order[position])] = value

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def regression_run(module: str, *more: str) -> list[str]:
    """Return arguments of a run in `run` on `dataset` and `squared` of a module."""
    return [
        f"--data.source={module}:dataset",
        f"--model.name={__name__}:regression",
        f"--model.loss={module}:squared",
        f"--batch.global-batch-size={BATCH}",
        "--batch.microbatch-size=2",
        "--precision.policy=fp32",
        f"--seed={SEED}",
        f"--steps={STEPS}",
        "--schedule.warmup-steps=2",
        "--checkpoint.every=3",
        # A few noisy steps make a rough statistic; a spike is a million times as large.
        "--divergence.warmup-steps=6",
        "--divergence.threshold=100",
        "--run-dir=run",
        *more,
    ]


def trainer_of(config: RunConfig, *callbacks: Callback) -> Trainer:
    """Build a trainer on the ranks of this process group, or alone; rank 0 prints."""
    world = World.current("cpu")
    return Trainer(config, world, Console(config.log, quiet=world.rank != 0), callbacks)


def finished(run: Trainer) -> Trainer:
    """Train to the end."""
    assert run.run(StopSignals())
    return run


def printed(run: Trainer, *starts: str) -> list[str]:
    """Train to the end; return the messages that begin with one of these texts."""
    lines: list[str] = []
    run.console.message = lines.append  # type: ignore[method-assign]
    finished(run)
    return [line for line in lines if line.startswith(starts)]
