"""Check for bit-identical training on any number of ranks: `python -m benchmarks.reproducible`.

Trains the quickstart's model on the quickstart's data, with its optimizer, schedule and clipping,
for 50 steps of 8 microbatches, one of which overflows, distributed as 1 x 8, 2 x 4 and 4 x 2 (ranks
x microbatches). At the end it gathers the state and computes the SHA-256 of all weights, FP32
master weights and moments: with `reproducible`, with `reproducible` and `shard_optimizer`, and in
the ordinary mode. Samples are shorter than in the quickstart.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import Ranks, is_rank, serve
from benchmarks.report import machine, save, sized
from benchmarks.tables.runs import reproducible
from distmp import Engine
from distmp.config import RunConfig, load
from distmp.distributed.world import World
from distmp.training.components import (
    Progress,
    build_engine,
    build_model_and_data,
    training_batches,
)
from distmp.utils.flat_shard import FlatShard

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
MICROBATCHES = 8
LAYOUTS = {f"{ranks} x {MICROBATCHES // ranks}": ranks for ranks in sized((1, 2, 4), (1, 2))}
OVERFLOW = 5  # number of the microbatch that overflows in one step

MODES: dict[str, dict[str, bool]] = {
    "reproducible": {"reproducible": True},
    "reproducible, shard_optimizer": {"reproducible": True, "shard_optimizer": True},
    "ordinary": {},
}
POLICIES = sized(("fp32", "bf16"), ("fp32",))


class Training:
    """One rank of a run.

    Args:
        method: Policy and mode, separated by a slash.
        world: The process group.
    """

    def __init__(self, method: str, world: World) -> None:
        self._policy, _, mode = method.partition("/")
        self._mode = MODES[mode]
        self._world = world

    def train(self, order: str) -> dict[str, Any]:
        """Train with the number of steps and the sample length in `order`.

        Returns:
            The digest, the numbers of applied, skipped and clipped updates, and the last loss.
        """
        steps, length = map(int, order.split())
        config = _config(steps, length, self._mode)
        parts = build_model_and_data(config, self._world)
        batches = training_batches(config, parts, self._world, Progress())
        step, arrived, loss = 0, 0, parts.loss
        first = self._world.rank * parts.microbatches

        def overflowing(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            nonlocal arrived
            loss_sum, weight = loss(model, batch)
            overflows = step == steps // 2 and first + arrived == OVERFLOW
            arrived += 1
            return loss_sum * math.inf if overflows else loss_sum, weight

        engine = build_engine(
            config,
            parts._replace(loss=overflowing),
            self._world,
            policy=self._policy,
            attribution=False,
        )
        outcomes = []
        with closing(batches):
            for step in range(steps):  # noqa: B007 (read by the loss)
                arrived = 0
                outcomes.append(engine.step(next(batches).microbatches).numbers)
        limit = config.optim.max_norm
        assert limit is not None
        return {
            "digest": _digest(engine, self._world),
            "applied": outcomes[-1].applied_total,
            "skipped": outcomes[-1].skipped_total,
            "clipped": sum(not one.skipped and one.grad_norm > limit for one in outcomes),
            "loss": outcomes[-1].loss,
        }


def _config(steps: int, length: int, options: Mapping[str, bool]) -> RunConfig:
    config = load(["--config", str(QUICKSTART)])
    return replace(
        config,
        shard_optimizer=options.get("shard_optimizer", False),
        reproducible=options.get("reproducible", False),
        steps=steps,
        strategy="auto",
        data=replace(config.data, sequence_length=length),
        batch=replace(config.batch, global_batch_size=MICROBATCHES, microbatch_size=1),
        schedule=replace(config.schedule, warmup_steps=steps // 5),
    )


def _digest(engine: Engine, world: World) -> str:
    """Return the SHA-256 of all full weights, master weights and moments."""
    state = {
        name: tensor
        for name, tensor in engine.state_dict().items()
        if name.startswith(("model/", "optimizer/"))
    }
    computed_with = {f"module/{name}": part for name, part in engine.module.named_parameters()}
    digest = hashlib.sha256()
    for name, tensor in sorted({**state, **computed_with}.items()):
        full = _full(tensor, world).detach()
        digest.update(f"{name} {full.dtype} {tuple(full.shape)}".encode())
        digest.update(full.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _full(tensor: Tensor, world: World) -> Tensor:
    if not isinstance(tensor, FlatShard):
        return tensor
    parts: list[Any] = [None] * world.world_size
    dist.all_gather_object(parts, (tensor.start, tensor.as_subclass(Tensor).clone()), world.group)
    ordered = [part for _, part in sorted(parts, key=lambda entry: entry[0])]
    return torch.cat(ordered).view(tensor.global_shape)


def main() -> int:
    if is_rank():
        return serve(lambda method, world: Training(method, world).train)
    arguments = _arguments()
    order = f"{arguments.steps} {arguments.sequence_length}"
    runs = [
        {"policy": policy, "mode": mode, "layout": layout, **_run(f"{policy}/{mode}", ranks, order)}
        for policy in POLICIES
        for mode in MODES
        for layout, ranks in LAYOUTS.items()
    ]
    result = {
        "machine": machine(),
        "steps": arguments.steps,
        "sequence_length": arguments.sequence_length,
        "runs": runs,
    }
    path = save("reproducible-cpu", result)
    print(reproducible(result))
    print(f"saved to {path}")
    return 0 if _all_equal(runs) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sequence-length", type=int, default=64)
    return parser.parse_args()


def _run(method: str, ranks: int, order: str) -> dict[str, Any]:
    with Ranks("benchmarks.reproducible", method, ranks) as started:
        first, *others = started.ask(order)
    assert all(other["digest"] == first["digest"] for other in others), "ranks differ"
    return dict(first)


def _all_equal(runs: Iterable[dict[str, Any]]) -> bool:
    """Return whether all reproducible runs of a policy have the same digest, sharded or not."""
    digests = {
        (run["policy"], run["digest"]) for run in runs if run["mode"].startswith("reproducible")
    }
    return len(digests) == len(POLICIES)


if __name__ == "__main__":
    sys.exit(main())
