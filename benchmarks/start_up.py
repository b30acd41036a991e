"""Measure the start from a sharded directory of weights: `python -m benchmarks.start_up`.

A model of transformers in several bf16 files becomes FP32 shards on four CPU ranks in four ways:

- distmp: as `distmp.train` does with `strategy: fsdp` and `model.name: hf:DIRECTORY`. This includes
  reading the training data and building the engine with its optimizer.
- Transformers: `from_pretrained` with a `distributed_config`, which shards before it loads.
- FSDP2 by hand: every rank calls `from_pretrained`, then `fully_shard`.
- accelerate: FSDP2 with `cpu_ram_efficient_loading` (`fsdp2_prepare_model`, because `prepare` uses
  FSDP2 on accelerators only). Every rank loads the model all the same: Transformers leaves weights
  out on other ranks only where the file lacks them.

Each way starts new processes in every round. Time and memory count from the end of imports and
rendezvous; memory excludes file-backed pages and is sampled every 2 ms.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.loops import shard
from benchmarks.memory import anonymous_bytes
from benchmarks.random_llama import write_llama
from benchmarks.ranks import Ranks, is_rank, serve
from benchmarks.report import alternating, machine, save, sized
from benchmarks.tables import start_up as tables
from distmp.distributed.world import World

RANKS = sized(4, 2)
SHARD_BYTES = 50 * 10**6
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}
"""102 M parameters."""
_PACKAGES = ("torch", "transformers", "accelerate")


def main() -> int:
    if is_rank():
        return serve(make)
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="start-up-") as directory:
        model = Path(directory, "llama")
        parameters = write_llama(model, LLAMA, SHARD_BYTES)
        files = len([*model.glob("*.safetensors")])
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in STARTS}
        for name, _ in alternating([*STARTS], arguments.rounds, warm_up=0):
            found[name].append(measure(name, model))
    result = {
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "parameters": parameters,
        "files": files,
        "ranks": RANKS,
        "loops": {
            name: {key: [run[key] for run in runs] for key in ("seconds", "first", "others")}
            for name, runs in found.items()
        },
    }
    print(tables.start_up(result))
    print(f"saved to {save('start-up-cpu', result)}")
    return 0


def measure(name: str, model: Path) -> dict[str, Any]:
    """Start a model on new ranks.

    Returns:
        The longest time of a rank in seconds, and the peak of the memory in bytes: of the first
        rank, and the highest of the others.
    """
    with Ranks("benchmarks.start_up", name, RANKS) as ranks:
        seconds, peaks = zip(*ranks.ask(str(model)), strict=True)
    print(name, max(seconds), [peak >> 20 for peak in peaks], flush=True)
    return {"seconds": max(seconds), "first": peaks[0], "others": max(peaks[1:])}


def make(name: str, _: World) -> Callable[[str], tuple[float, int]]:
    """Return the measurement of a start on this rank: seconds, and the peak in bytes."""
    for package in (
        "accelerate",
        "transformers.models.llama.modeling_llama",
        "distmp.training.components",
    ):
        importlib.import_module(package)  # not part of the start
    return lambda directory: _measure_rank(STARTS[name], Path(directory))


def _measure_rank(start: Callable[[Path], nn.Module], directory: Path) -> tuple[float, int]:
    dist.barrier()
    peak = _Peak()
    started = time.perf_counter()
    with peak:
        kept = start(directory)
        dist.barrier()
    seconds = time.perf_counter() - started
    _check(kept)
    return seconds, peak.bytes


def _check(model: nn.Module) -> None:
    parameters: list[Any] = [*model.parameters()]
    shards = [parameter.to_local() for parameter in parameters]
    assert all(shard.dtype == torch.float32 and bool(shard.isfinite().all()) for shard in shards)


class _Peak:
    """Samples the memory of this process, above that at the start.

    Attributes:
        bytes: The peak.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._before = anonymous_bytes(os.getpid())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes(os.getpid()) - self._before)


def _distmp(directory: Path) -> nn.Module:
    from distmp.config import load
    from distmp.distributed.world import world_of_process
    from distmp.training.components import build_engine, build_model_and_data, start_from_weights

    config = load(
        [
            f"--model.name=hf:{directory}",
            f"--data.path={Path(__file__).parent}",
            *("--data.sequence-length=16", "--batch.microbatch-size=1"),
            f"--batch.global-batch-size={RANKS}",
            *("--strategy=fsdp", "--sharding.accumulate=sharded", "--optim.name=sgd"),
            "--optim.options={momentum: 0.0}",
        ]
    )
    world = world_of_process("cpu")
    parts = build_model_and_data(config, world)
    engine = build_engine(config, parts, world, policy="fp32", attribution=False)
    start_from_weights(parts, engine)
    return engine.model


def _by_hand(directory: Path) -> nn.Module:
    from transformers import LlamaForCausalLM

    model: nn.Module = shard(LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32), None)
    return model


def _accelerate(directory: Path) -> nn.Module:
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import LlamaForCausalLM

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    # accelerate itself allows this on accelerators only; its code also runs on CPUs.
    plugin.cpu_ram_efficient_loading = True
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prepared: nn.Module = fsdp2_prepare_model(accelerator, model)
    return prepared


def _transformers(directory: Path) -> nn.Module:
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    model: nn.Module = LlamaForCausalLM.from_pretrained(
        directory, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=RANKS)
    )
    return model


STARTS: dict[str, Callable[[Path], nn.Module]] = {
    "distmp": _distmp,
    "Transformers, `distributed_config`": _transformers,
    "FSDP2 by hand": _by_hand,
    "accelerate, `cpu_ram_efficient_loading`": _accelerate,
}


if __name__ == "__main__":
    sys.exit(main())
