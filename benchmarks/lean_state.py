"""Compare weights and optimizer state in few bits: `python -m benchmarks.lean_state`.

Trains the byte model of the quickstart on Python's library with FP32 master weights, and with
weights and moments in fewer bits: the same initial weights and batches, several seeds. Reports the
held-out loss relative to that of FP32 master weights, and the measured bytes per parameter. On two
CPU cores the model of 1 M parameters takes about a minute for 400 steps of one method and seed;
`--size 22m --steps 2000 --device cuda` measures the model of 22 M parameters.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.device import parse, parser
from benchmarks.report import machine, save
from benchmarks.tables import precision
from distmp.config import RunConfig, load
from distmp.data.evaluation import evaluation_batches
from distmp.distributed.world import World
from distmp.engine import Engine
from distmp.training.setup import Progress, build_engine, prepare, training_batches

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
STOCHASTIC = "bf16-pure,stochastic_rounding=true"
# Options of each method; the first one is the reference.
METHODS = {
    "`bf16`": ("bf16", None),
    "`bf16`, `state: bf16`": ("bf16", "bf16"),
    "`bf16`, `state: fp8`": ("bf16", "fp8"),
    "`bf16-pure`": ("bf16-pure", None),
    "`bf16-pure`, stochastic": (STOCHASTIC, None),
    "`bf16-pure`, stochastic, `state: fp8`": (STOCHASTIC, "fp8"),
}


def main() -> int:
    arguments = _arguments()
    methods: dict[str, Any] = {}
    for seed in range(arguments.seeds):
        for name in METHODS:
            found = train(name, seed, arguments)
            entry = methods.setdefault(name, {"bytes": found["bytes"], "losses": []})
            entry["losses"].append(found["loss"])
            print(f"seed {seed}, {name}: {found['loss']:.5f}", flush=True)
    result = {
        "machine": machine(arguments.device),
        "size": arguments.size,
        "steps": arguments.steps,
        "lr": arguments.lr,
        "beta2": arguments.beta2,
        "methods": methods,
    }
    print(precision.lean_state(result))
    size = "" if arguments.size == "22m" else f"-{arguments.size}"
    print(f"saved to {save(f'lean-state{size}-{arguments.device.type}', result)}")
    return 0


def train(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with a method; return the held-out loss and the bytes per parameter."""
    config = _config(name, seed, arguments)
    world = World.current(arguments.device)
    parts = prepare(config, world)
    engine = build_engine(config, parts, world, policy=config.precision.policy, attribution=False)
    batches = training_batches(config, parts, world, Progress())
    for _ in range(config.steps):
        engine.step(next(batches))
    held_out = evaluation_batches(
        parts.datasets.validation,
        samples=config.validation.final_samples,
        microbatch_size=config.batch.microbatch_size,
        rank=0,
        world_size=1,
    )
    return {"loss": engine.evaluate(held_out), "bytes": bytes_per_parameter(engine)}


def bytes_per_parameter(engine: Engine) -> dict[str, float]:
    """Return the bytes of weights with optimizer state, and of FP32 gradients."""
    uses = engine.tensors_by_use()
    count = sum(parameter.numel() for parameter in engine.module.parameters())
    kept = ("parameters", "master weights", "optimizer state")
    tensors = {tensor.data_ptr(): tensor for use in kept for tensor in uses[use]}
    gradients = sum(tensor.nbytes for tensor in uses["FP32 gradients"])
    return {
        "kept": sum(tensor.nbytes for tensor in tensors.values()) / count,
        "gradients": gradients / count,
    }


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--size", help="size of the transformer (default: 1m, on a GPU 22m)")
    options.add_argument("--steps", type=int, help="default: 400, on a GPU 2000")
    options.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    options.add_argument("--lr", type=float, default=1e-3, help="default: 1e-3")
    options.add_argument("--beta2", type=float, default=0.95, help="default: 0.95")
    size, steps = {"cpu": "1m", "cuda": "22m"}, {"cpu": 400, "cuda": 2000}
    return parse(options, size=size, steps=steps)


def _config(name: str, seed: int, arguments: argparse.Namespace) -> RunConfig:
    policy, state = METHODS[name]
    return load(
        [
            f"--config={QUICKSTART}",
            "--strategy=single",
            f"--precision.policy={policy}",
            *([f"--optim.state={state}"] if state else []),
            f"--optim.lr={arguments.lr}",
            f"--optim.options={{betas: [0.9, {arguments.beta2}]}}",
            f"--model.size={arguments.size}",
            f"--steps={arguments.steps}",
            f"--seed={seed}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
