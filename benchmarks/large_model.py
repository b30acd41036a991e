"""Measure a fine-tuning run on two versions of distmp: `python -m benchmarks.large_model`.

A Llama with random weights of 1 B parameters in many bf16 files trains for two steps on two CPU
ranks with `strategy: fsdp` and SGD, and is saved as a model of transformers. Memory excludes
file-backed pages and is sampled every 50 ms. `--baseline CHECKOUT` names a checkout of another
version, which runs after this one. Both need 15 GiB of free memory, 10 GiB on the disk and 15
minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.report import machine, save
from benchmarks.tables import large_model as tables
from distmp.export.files import write

RANKS, STEPS = 2, 2
SHARD_BYTES = 500 * 10**6
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}
"""1.009 B parameters."""

ROOT = Path(__file__).parent.parent


class RandomWeights:
    """Random weights of a model of transformers, one tensor at a time; see `export.files`.

    Args:
        values: Values of a `LlamaConfig`.
        dtype: Dtype of the weights.

    Attributes:
        config: The configuration.
        specs: Shape and dtype of each tensor, as tensors on the meta device.
    """

    def __init__(self, values: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = LlamaConfig(**values)
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
        self.specs = {name: value.to(dtype) for name, value in model.state_dict().items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return random values; ones for the weights of norms."""
        return {name: self._value(self.specs[name]) for name in names}

    def _value(self, spec: Tensor) -> Tensor:
        if spec.dim() == 1:
            return torch.ones_like(spec, device="cpu")
        return torch.empty_like(spec, device="cpu").normal_(std=0.02)


def write_llama(folder: Path, values: Mapping[str, Any], shard_bytes: int) -> int:
    """Write a Llama with random weights in bf16; return the number of its parameters."""
    weights = RandomWeights(values)
    described = weights.config.to_dict()
    write(folder, weights, described, torch.bfloat16, shard_bytes)
    return sum(spec.numel() for spec in weights.specs.values())


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--baseline", type=Path, help="a checkout of another version of distmp")
    arguments = options.parse_args()
    versions = {"this version": ROOT}
    if arguments.baseline is not None:
        versions["baseline"] = arguments.baseline.absolute()
    with tempfile.TemporaryDirectory(prefix="large-model-") as folder:
        model = Path(folder, "llama")
        parameters = write_llama(model, LLAMA, SHARD_BYTES)
        runs = {name: fine_tune(model, checkout) for name, checkout in versions.items()}
    result = {
        "machine": machine(),
        "parameters": parameters,
        "ranks": RANKS,
        "steps": STEPS,
        "runs": runs,
    }
    print(tables.large_model(result))
    print(f"saved to {save('large-model-cpu', result)}")
    return 0


def fine_tune(model: Path, checkout: Path) -> dict[str, Any]:
    """Fine-tune a model with the distmp of a checkout.

    Returns:
        The peak of the memory in bytes, of the rank that takes most and of all ranks together; the
        seconds of the run; the commit.
    """
    with tempfile.TemporaryDirectory(prefix="fine-tune-", dir=model.parent) as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={RANKS}", "-m", "distmp.train"),
            f"--model.name=hf:{model}",
            f"--data.path={ROOT / 'benchmarks'}",
            f"--steps={STEPS}",
            *("--strategy=fsdp", "--sharding.accumulate=sharded", "--precision.policy=bf16"),
            *("--optim.name=sgd", "--optim.options={momentum: 0.0}"),
            *("--schedule.name=constant", "--schedule.warmup-steps=0"),
            *("--data.sequence-length=16", "--batch.microbatch-size=1"),
            f"--batch.global-batch-size={RANKS}",
            *("--validation.final-samples=2", "--sample.length=0"),
            "--run-dir=run",
        ]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        started = time.perf_counter()
        with subprocess.Popen(command, cwd=folder, env=environment) as process:
            peaks = _peaks_while_running(process)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        seconds = time.perf_counter() - started
        _check_loads(Path(folder, "run", "model"))
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout)
    return {**peaks, "seconds": seconds, "commit": commit.decode().strip()}


def _peaks_while_running(process: subprocess.Popen[bytes]) -> dict[str, int]:
    peaks = {"largest rank": 0, "all ranks": 0}
    while process.poll() is None:
        ranks = psutil.Process(process.pid).children(recursive=True)
        taken = [anonymous_bytes(rank.pid) for rank in ranks]
        peaks["largest rank"] = max(peaks["largest rank"], *taken, 0)
        peaks["all ranks"] = max(peaks["all ranks"], sum(taken))
        time.sleep(0.05)
    return peaks


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process without file-backed pages; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    field = status.partition("RssAnon:")[2].split()
    return 1024 * int(field[0]) if field else 0


def _check_loads(folder: Path) -> None:
    """Load the written model in transformers."""
    from transformers import LlamaForCausalLM

    loaded: Any = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    model, report = loaded
    problems = {key: value for key, value in report.items() if value}
    if problems:
        raise RuntimeError(f"{folder} does not load in transformers: {problems}")
    if not all(bool(value.isfinite().all()) for value in model.parameters()):
        raise RuntimeError(f"{folder} has values that are not finite")


if __name__ == "__main__":
    sys.exit(main())
