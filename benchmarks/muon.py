"""Compare updates of Muon at 1, 2 and 4 ranks: `python -m benchmarks.muon`.

A transformer takes one step on the same global batch in FP32, divided over the ranks. The change of
its hidden matrices is compared with that of the same method on one rank:

- distmp: `optim.name: muon` under `fsdp` and with `shard_optimizer`, and under `fsdp` with
  iterations in bfloat16.
- torch: `torch.optim.Muon` on the parameters that FSDP2 has sharded.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from benchmarks.ranks import Ranks, is_rank, serve
from benchmarks.report import machine, save, sized
from benchmarks.tables.runs import muon
from distmp import Engine
from distmp.distributed.world import World
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.optim import Muon
from distmp.optim.muon import is_hidden
from distmp.utils.flat_shard import gathered

CONFIG = TransformerConfig(256, 64, 4, 128, 4, 384)
SAMPLES, LENGTH, RATE = 16, 64, 0.02
RANKS = sized((1, 2, 4), (1, 2))
Updates = dict[str, Tensor]


def main() -> int:
    if is_rank():
        return serve(lambda method, world: lambda path: _save(METHODS[method], world, Path(path)))
    result = {
        "machine": machine("cpu"),
        "parameters": sum(tensor.numel() for tensor in Transformer(CONFIG).parameters()),
        "differences": {method: _differences(method) for method in METHODS},
    }
    print(muon(result))
    print(f"saved to {save('muon-cpu', result)}")
    return 0


def _differences(method: str) -> dict[int, dict[str, float]]:
    """Return by number of ranks the largest and the mean difference of a matrix's update."""
    updates = {ranks: _updates(method, ranks) for ranks in RANKS}
    one = updates[1]
    found = {}
    for ranks in RANKS[1:]:
        each = [float((updates[ranks][n] - one[n]).norm() / one[n].norm()) for n in one]
        found[ranks] = {"largest": max(each), "mean": sum(each) / len(each)}
    return found


def _updates(method: str, ranks: int) -> Updates:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "updates"
        with Ranks("benchmarks.muon", method, ranks) as started:
            started.ask(str(path))
        updates: Updates = torch.load(path, weights_only=True)
    return updates


def _save(train: Callable[[nn.Module, World], Updates], world: World, path: Path) -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    after = train(model, world)
    if world.rank == 0:
        hidden = [name for name in after if is_hidden(name, start[name])]
        torch.save({name: after[name] - start[name] for name in hidden}, path)


def _batch(world: World) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(256, (SAMPLES, LENGTH + 1), generator=generator)
    return batch[world.rank :: world.world_size]


def _loss_sum(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def _with_distmp(ns_dtype: str, **settings: Any) -> Callable[[nn.Module, World], Updates]:
    def train(model: nn.Module, world: World) -> Updates:
        engine = Engine(
            model,
            lambda module, batch: (_loss_sum(module, batch), batch[:, 1:].numel()),
            lambda named: Muon(named, lr=RATE, ns_dtype=ns_dtype),
            policy="fp32",
            **settings,
        )
        engine.step([_batch(world)])
        return {
            name.removeprefix("model/"): gathered(value).detach().clone()
            for name, value in engine.state_dict().items()
            if name.startswith("model/")
        }

    return train


def _with_torch(model: nn.Module, world: World) -> Updates:
    assert isinstance(model, Transformer)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    named = dict(model.named_parameters())
    hidden = [tensor for name, tensor in named.items() if is_hidden(name, tensor)]
    others = [tensor for name, tensor in named.items() if not is_hidden(name, tensor)]
    optimizers = [
        torch.optim.Muon(hidden, lr=RATE, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE),
    ]
    batch = _batch(world)
    (_loss_sum(model, batch) / batch[:, 1:].numel()).backward()  # FSDP2 takes the mean over ranks
    for optimizer in optimizers:
        optimizer.step()
    return {name: gathered(tensor).detach().clone() for name, tensor in named.items()}


METHODS: dict[str, Callable[[nn.Module, World], Updates]] = {
    "distmp, `fsdp`": _with_distmp("fp32", strategy="fsdp"),
    "distmp, `shard_optimizer`": _with_distmp("fp32", shard_optimizer=True),
    "distmp, `fsdp`, `ns_dtype: bf16`": _with_distmp("bf16", strategy="fsdp"),
    "torch.optim.Muon, FSDP2": _with_torch,
}

if __name__ == "__main__":
    sys.exit(main())
