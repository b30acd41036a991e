"""Compare weights and optimizer state in 16 and 32 bits: `python -m benchmarks.lean_state`.

Trains the 22 M transformer on the text of the quickstart with FP32 master weights, and with
bfloat16 weights and moments, with several seeds. Reports the held-out loss relative to that of FP32
master weights, and the measured bytes per parameter. On one CPU core a training takes about five
minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.continued_runs import QUICKSTART, REFERENCE, final_losses, parser, save_result
from benchmarks.report import machine
from benchmarks.tables.formats import lean_state
from distmp.config import load
from distmp.distributed.world import World
from distmp.training.components import (
    Progress,
    build_engine,
    build_model_and_data,
    training_batches,
)

# Arguments of the run by the name of the candidate.
CANDIDATES: dict[str, tuple[str, ...]] = {
    REFERENCE: ("--precision.policy", "bf16"),
    "bf16-pure": ("--precision.policy", "bf16-pure"),
    "bf16-pure, stochastic": ("--precision.policy", "bf16-pure,stochastic_rounding=true"),
}


def main() -> int:
    arguments = parser(__doc__).parse_args()
    result = {"machine": machine("cpu"), **final_losses(CANDIDATES, arguments)}
    result["bytes"] = {
        name: bytes_per_parameter(CANDIDATES[name], arguments.size) for name in result["losses"]
    }
    print(lean_state(result))
    print(f"saved to {save_result('lean-state', result)}")
    return 0


def bytes_per_parameter(options: Sequence[str], size: str) -> float:
    """Return the measured bytes of weights with optimizer state after a step, per parameter."""
    settings = [f"--config={QUICKSTART}", "--strategy=single", f"--model.size={size}", "--steps=1"]
    config = load([*settings, *options])
    world = World.current("cpu")
    parts = build_model_and_data(config, world)
    engine = build_engine(config, parts, world, policy=config.precision.policy, attribution=False)
    engine.step(next(training_batches(config, parts, world, Progress())).microbatches)
    uses = engine.tensors_by_use()
    kept = ("parameters", "master weights", "optimizer state")
    tensors = {tensor.data_ptr(): tensor for use in kept for tensor in uses[use]}
    count = sum(parameter.numel() for parameter in engine.module.parameters())
    return sum(tensor.nbytes for tensor in tensors.values()) / count


if __name__ == "__main__":
    sys.exit(main())
