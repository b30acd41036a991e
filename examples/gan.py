"""Train a generator and a discriminator, each with its own engine, to draw points on a circle.

    python examples/gan.py
    torchrun --nproc-per-node=2 examples/gan.py

Run it again to continue from the checkpoints in `runs/gan`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import distmp

RADIUS, NOISE, WIDTH, BATCH = 2.0, 4, 32, 64


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, outputs),
    )


def points(generator: torch.Generator) -> Tensor:
    """Return points near a circle, of shape (BATCH, 2)."""
    angles = 2 * math.pi * torch.rand(BATCH, generator=generator)
    noise = 0.05 * torch.randn(BATCH, 2, generator=generator)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1) + noise


def bce_sum(logits: Tensor, label: float) -> Tensor:
    """Return the summed binary cross entropy of logits and one label."""
    logits = logits.float()
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, label), reduction="sum")


def adam(named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=2e-3, betas=(0.5, 0.9), fused=True)


def build(policy: str) -> tuple[distmp.Engine, distmp.Engine]:
    """Return the engines of the generator and the discriminator."""

    def discriminator_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        real, noise = batch
        with torch.no_grad():  # no gradient of the generator
            fake = generator.module(noise).float()
        return bce_sum(module(real), 1.0) + bce_sum(module(fake), 0.0), len(real)

    def generator_loss(module: nn.Module, noise: Tensor) -> tuple[Tensor, int]:
        # The gradient flows through the discriminator, whose engine ignores its part.
        return bce_sum(discriminator.module(module(noise)), 1.0), len(noise)

    generator = distmp.Engine(network(NOISE, 2), generator_loss, adam, policy=policy)
    discriminator = distmp.Engine(network(2, 1), discriminator_loss, adam, policy=policy)
    return generator, discriminator


def resume(engines: dict[str, distmp.Engine], directory: str) -> int:
    """Load the latest checkpoint that both engines have; return its step, 0 without one."""
    steps = {
        name: engine.load(f"{directory}/{name}", missing_ok=True)["step"]
        for name, engine in engines.items()
    }
    common = min(steps.values())
    for name, engine in engines.items():
        if steps[name] > common:  # the process ended between the two saves
            engine.load(f"{directory}/{name}/step-{common:06d}")
    return common


def save(engines: dict[str, distmp.Engine], directory: str) -> None:
    for name, engine in engines.items():
        engine.save(f"{directory}/{name}")


@torch.no_grad()
def mean_radius(generator: distmp.Engine, random: torch.Generator) -> float:
    """Return the mean distance of generated points from the center, over all ranks."""
    noise = torch.randn(BATCH, NOISE, generator=random).to(generator.device)
    drawn = generator.module(noise).float()
    return float(generator.gather(drawn.norm(dim=1)).mean())


def train(steps: int, directory: str, policy: str = "bf16-autocast") -> float:
    """Train up to a number of steps; return the mean radius of generated points."""
    torch.manual_seed(0)
    generator, discriminator = build(policy)
    engines = {"generator": generator, "discriminator": discriminator}
    start = resume(engines, directory)
    if start == 0:  # a step that both have, if the process ends between the two saves below
        save(engines, directory)
    # Draw different points on each rank, and after a restart.
    random = torch.Generator().manual_seed(1000 * start + generator.world.rank)
    for _ in range(start, steps):
        noise = torch.randn(BATCH, NOISE, generator=random)
        discriminator.check(discriminator.step([(points(random), noise)]))
        generator.check(generator.step([torch.randn(BATCH, NOISE, generator=random)]))
    save(engines, directory)
    return mean_radius(generator, random)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--directory", default="runs/gan")
    arguments = parser.parse_args()
    radius = train(arguments.steps, arguments.directory)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"mean radius of generated points: {radius:.2f} (of the data: {RADIUS})")


if __name__ == "__main__":
    main()
