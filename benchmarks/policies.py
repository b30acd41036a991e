"""Compare the precision policies on this device: `python -m benchmarks.policies`.

Runs `distmp calibrate` on a transformer trained on the bytes of Python's library: time,
memory and losses under every policy, with the same weights and batches, on one rank; and with
`--device cuda` the share of the GPU's peak.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.device import parse, parser
from benchmarks.peak import kind_of, transformer_flops
from benchmarks.report import machine, save
from benchmarks.tables import precision
from distmp.commands.calibrate.policies import compare
from distmp.commands.calibrate.settings import CalibrationConfig
from distmp.data.token_metadata import VOCABULARY_SIZE
from distmp.distributed.world import World
from distmp.precision import policy

SIZES = {"cpu": "1m", "cuda": "350m"}
LENGTHS = {"cpu": 128, "cuda": 1024}
SAMPLES = {"cpu": 4, "cuda": 8}
MICROBATCHES = 2


def main() -> int:
    arguments = _arguments()
    device = arguments.device
    config = _config(arguments)
    compared = compare(config, World.current(device))
    samples, length = config.batch.microbatch_size, config.data.sequence_length
    work = transformer_flops(config.model.size, samples, length, VOCABULARY_SIZE)
    result: dict[str, Any] = {
        "machine": machine(device),
        "size": config.model.size,
        "tokens": config.batch.global_batch_size * length,
        "flops": MICROBATCHES * work,
        "kinds": {name: kind_of(policy(name)) for name in compared.measured},
        "last_losses": {name: one.last_loss for name, one in compared.measured.items()},
        "apart": {name: compared.difference(name) for name in compared.measured},
        **compared.as_json(),
    }
    print(precision.policies(result))
    print(f"saved to {save(f'policies-{device.type}', result)}")
    return 0


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--size", help="size of the transformer (default: 1m, on a GPU 350m)")
    options.add_argument("--steps", type=int, default=30, help="steps under each policy")
    return parse(options, size=SIZES)


def _config(arguments: argparse.Namespace) -> CalibrationConfig:
    device = arguments.device.type
    samples = SAMPLES[device]
    return CalibrationConfig.load(
        [
            f"--model.size={arguments.size}",
            f"--data.sequence-length={LENGTHS[device]}",
            f"--batch.microbatch-size={samples}",
            f"--batch.global-batch-size={MICROBATCHES * samples}",
            f"--calibrate-steps={arguments.steps}",
            "--policies=fp32,tf32,bf16,bf16-autocast,fp16,fp16-autocast",
            "--optim.lr=3e-4",
            "--schedule.warmup-steps=10",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
