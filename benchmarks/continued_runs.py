"""Held-out losses of runs that share their first steps with a reference run.

Each candidate continues from a checkpoint of the reference with the same seed, and so from the same
weights and with the same batches. In the first steps of a run, rounding errors decide when the loss
leaves its first plateau, which would hide the effects that are compared. Each run is a separate
process, on one rank. A complete run is not repeated: a second call continues an interrupted
benchmark.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import RUNS, commit, save, sized

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
REFERENCE = "bf16"
# All candidates share the first 1 / SHARED of the steps.
SHARED = 3


class Training(NamedTuple):
    """How a model of some size is trained."""

    steps: int
    samples: int  # of a step
    length: int  # tokens of a sample
    lr: float


TRAININGS = {
    "22m": Training(300, 4, 256, 1e-3),
    "1m": sized(Training(600, 8, 256, 4e-3), Training(6, 1, 32, 4e-3)),
}


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of `final_losses`."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--directory", type=Path, default=sized(Path("build"), RUNS) / f"continued-runs-{commit()}"
    )
    options.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    options.add_argument("--size", default="22m", choices=TRAININGS, help="default: 22m")
    return options


def final_losses(
    candidates: Mapping[str, Sequence[str]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train candidates with several seeds; return their final losses and what was trained.

    Args:
        candidates: Arguments of `distmp.train` by the name of the candidate; `REFERENCE` is first.
        arguments: The parsed options of `parser`.

    Returns:
        `losses`, in nats per byte, with one entry per seed for each candidate; `differences`, the
        `mean` and the `largest` relative difference from the reference with the same seed; and
        the size of the trainings.
    """
    training = TRAININGS[arguments.size]
    losses: dict[str, list[float]] = {name: [] for name in candidates}
    for seed in range(1, arguments.seeds + 1):
        for name, options in candidates.items():
            losses[name].append(_final_loss(name, options, seed, arguments))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    return {
        "size": arguments.size,
        "steps": training.steps,
        "shared": training.steps // SHARED,
        "tokens": training.samples * training.length,
        "losses": losses,
        "differences": _differences(losses),
    }


def save_result(name: str, result: dict[str, Any]) -> Path:
    """Save a result under the name of its table, with the size if it is not the default."""
    size = "" if result["size"] == "22m" else f"-{result['size']}"
    return save(f"{name}{size}-cpu", result)


def _final_loss(
    name: str, options: Sequence[str], seed: int, arguments: argparse.Namespace
) -> float:
    training = TRAININGS[arguments.size]
    directory = _directory(name, seed, arguments)
    shared = training.steps // SHARED
    start = _directory(REFERENCE, seed, arguments) / "checkpoints" / f"step-{shared:06d}"
    records = directory / "steps.jsonl"
    if not (records.exists() and _held_out_loss(records, training.steps) is not None):
        if name != REFERENCE:  # an interrupted one has no checkpoint to continue from
            shutil.rmtree(directory, ignore_errors=True)
        settings: dict[str, Any] = {
            "run_dir": directory,
            "resume": "auto" if name == REFERENCE else start,
            "seed": seed,
            "steps": training.steps,
            "compile": sized("blocks", "none"),
            "model.size": arguments.size,
            "data.sequence_length": training.length,
            "batch.global_batch_size": training.samples,
            "batch.microbatch_size": training.samples,
            "optim.lr": training.lr,
            "validation.every": 0,
            "validation.final_samples": 128,
            "checkpoint.every": shared if name == REFERENCE else 0,
            "checkpoint.keep": SHARED + 1,  # all of the reference
        }
        command = [sys.executable, "-m", "distmp.train", "--config", str(QUICKSTART)]
        command += [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    loss = _held_out_loss(records, training.steps)
    assert loss is not None, f"{records} has no held-out loss"
    return loss


def _directory(name: str, seed: int, arguments: argparse.Namespace) -> Path:
    run = f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    return Path(arguments.directory / arguments.size / run)


def _held_out_loss(records: Path, steps: int) -> float | None:
    last = json.loads(records.read_text().splitlines()[-1])
    return last["validation_loss"] if last["step"] == steps else None


def _differences(losses: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    found = {}
    for name, values in losses.items():
        apart = [value / other - 1 for value, other in zip(values, losses[REFERENCE], strict=True)]
        found[name] = {"mean": statistics.mean(apart), "largest": max(apart, key=abs)}
    return found
