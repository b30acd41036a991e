"""Memory and time of activation checkpointing: `python -m benchmarks.activation_checkpointing`.

Forward and backward of a transformer, with each value of the setting `activation_checkpointing`.
Memory is the peak of live tensors, without the parameters. On CPUs, time is processor time.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from benchmarks.device import busy_time, parse, parser
from benchmarks.memory import LiveStorages
from benchmarks.report import in_turns, machine, save, sized
from benchmarks.tables import loss as tables
from distmp.models.settings import SIZES
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.parallel.blocks import prepare_blocks
from distmp.parallel.settings import ActivationCheckpointing, ParallelConfig

SETTINGS: tuple[ActivationCheckpointing, ...] = ("none", "blocks")
# Size of the model, samples, tokens of a sample.
SHAPES = {"cpu": sized(("22m", 4, 1024), ("1m", 1, 64)), "cuda": ("350m", 8, 2048)}
VOCABULARY = 257


def main() -> int:
    arguments: argparse.Namespace = parse(parser(__doc__, rounds=5))
    device = arguments.device
    if device.type == "cpu":
        torch.set_num_threads(1)
    size, samples, length = SHAPES[device.type]
    config = TransformerConfig(VOCABULARY, length, **SIZES[size])
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (samples, length), generator=generator).to(device)
    models: dict[str, Transformer] = {name: _model(config, name, device) for name in SETTINGS}
    result = {
        "machine": machine(device),
        "size": size,
        "tokens": batch.numel(),
        "length": length,
        "bytes": {name: _peak(model, batch) for name, model in models.items()},
        "seconds": in_turns(
            list(models),
            arguments.rounds,
            lambda name: busy_time(lambda: _step(models[name], batch), device),
        ),
    }
    print(tables.activation_checkpointing(result))
    print(f"saved to {save(f'activation-checkpointing-{device.type}', result)}")
    return 0


def _model(
    config: TransformerConfig, setting: ActivationCheckpointing, device: torch.device
) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config).to(device)
    prepare_blocks(model, ParallelConfig(activation_checkpointing=setting))
    return model


def _step(model: Transformer, batch: Tensor) -> None:
    model.zero_grad()
    with torch.autocast(batch.device.type, torch.bfloat16):
        loss = model(batch, targets=batch)
    loss.backward()


def _peak(model: Transformer, batch: Tensor) -> int:
    with LiveStorages() as live:
        _step(model, batch)
    model.zero_grad()
    return live.peak


if __name__ == "__main__":
    sys.exit(main())
