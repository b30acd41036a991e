"""Final losses under FP8, MXFP8 and NVFP4, next to bf16: `python -m benchmarks.narrow_formats`.

Trains the 22 M transformer on the text of the quickstart under each policy and several seeds, each
in a process of its own, on one rank. Products are emulated where the device has no kernels for
them. A run that has ended is not repeated: a second call continues an interrupted one.

The first third of each run is shared: candidates continue from a checkpoint of the run in bf16 with
the same seed. In the first steps of a training, differences of the size of rounding errors decide
when the loss leaves its first plateau, which hides the effect of a format.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, save
from benchmarks.tables.formats import narrow_formats

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
REFERENCE = "bf16"
# This part of the steps is shared by all candidates.
SHARED = 3
# The share of the run after which the forward products of the last candidate are wide.
SWITCH = 0.8
# Arguments of the run by the name of the candidate.
CANDIDATES: dict[str, tuple[str, ...]] = {
    REFERENCE: ("--precision.policy", "bf16"),
    "fp8": ("--precision.policy", "fp8"),
    "fp8-rowwise": ("--precision.policy", "fp8-rowwise"),
    "mxfp8": ("--precision.policy", "mxfp8"),
    "nvfp4": ("--precision.policy", "nvfp4"),
    "nvfp4, late switch": (
        *("--precision.policy", "nvfp4"),
        *("--precision.phases", f"{{after_fraction: {SWITCH}, forward: bf16}}"),
    ),
}


def main() -> int:
    arguments = _arguments()
    losses: dict[str, list[float]] = {name: [] for name in arguments.policies}
    for seed in range(1, arguments.seeds + 1):
        for name in arguments.policies:
            losses[name].append(_final_loss(name, seed, arguments))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    result = {
        "machine": machine(torch.device("cpu")),
        "size": arguments.size,
        "steps": arguments.steps,
        "shared": arguments.steps // SHARED,
        "tokens": arguments.samples * arguments.length,
        "losses": losses,
        "differences": _differences(losses),
    }
    print(narrow_formats(result))
    print(f"saved to {save('narrow-formats-cpu', result)}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/narrow-formats"))
    parser.add_argument("--policies", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", default="22m")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=4, help="samples of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def _final_loss(name: str, seed: int, arguments: argparse.Namespace) -> float:
    """Return the held-out loss at the end of a run, in nats per byte."""
    folder = _folder(name, seed, arguments)
    shared = arguments.steps // SHARED
    start = _folder(REFERENCE, seed, arguments) / "checkpoints" / f"step-{shared:06d}"
    records = folder / "steps.jsonl"
    if not (records.exists() and _held_out_loss(records, arguments.steps) is not None):
        settings: dict[str, Any] = {
            "run_dir": folder,
            "resume": "auto" if name == REFERENCE else start,
            "seed": seed,
            "steps": arguments.steps,
            "compile": "blocks",
            "model.size": arguments.size,
            "data.sequence_length": arguments.length,
            "batch.global_batch_size": arguments.samples,
            "batch.microbatch_size": arguments.samples,
            "optim.lr": arguments.lr,
            "validation.every": 0,
            "validation.final_samples": 128,
            "sample.length": 0,
            "checkpoint.every": shared if name == REFERENCE else 0,
            "checkpoint.keep": SHARED,
        }
        command = [sys.executable, "-m", "distmp.train", "--config", str(QUICKSTART)]
        command += [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        subprocess.run([*command, *CANDIDATES[name]], check=True, stdout=subprocess.DEVNULL)
    loss = _held_out_loss(records, arguments.steps)
    assert loss is not None, f"{records} has no held-out loss"
    return loss


def _folder(name: str, seed: int, arguments: argparse.Namespace) -> Path:
    return Path(arguments.folder / f"{name.replace(',', '').replace(' ', '-')}-{seed}")


def _held_out_loss(records: Path, steps: int) -> float | None:
    last = json.loads(records.read_text().splitlines()[-1])
    return last["validation_loss"] if last["step"] == steps else None


def _differences(losses: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the relative differences from the reference with the same seed: mean, and largest."""
    found = {}
    for name, values in losses.items():
        apart = [value / other - 1 for value, other in zip(values, losses[REFERENCE], strict=True)]
        found[name] = {"mean": statistics.mean(apart), "largest": max(apart, key=abs)}
    return found


if __name__ == "__main__":
    sys.exit(main())
