"""Counts launches of steady steps; `python -m tests.engine.launches` stores them as a budget.

One process is rank 0 of any number of ranks. A collective counts as one launch and returns at once.
`test_launches.py` compares each strategy and policy with the budget.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from tests.fake_cuda import preload  # noqa: F401  (before torch)

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.commands.explain.fake_ranks import communicate, fake_ranks
from distmp.engine.engine import Engine
from tests.parallel.sharding import sharded
from tests.recording import Collectives
from tests.reference import Block

BUDGET = Path(__file__).with_suffix(".json")
COMMAND = "python -m tests.engine.launches"
TORCH = torch.__version__.partition("+")[0]

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, sharded optimizer": {"strategy": "ddp", "shard_optimizer": True},
    "reproducible": {"strategy": "ddp", "reproducible": True},
    "fsdp, reduced once": sharded("fsdp", accumulate="unsharded"),
    "fsdp, every microbatch": sharded("fsdp", accumulate="sharded"),
    "hsdp": sharded("hsdp", shard_size=4, accumulate="hybrid"),
}
LOW_PRECISION = "bf16,reduce=bf16"
POLICIES = ("fp32", "bf16", "fp16", "bf16-autocast", LOW_PRECISION)
CASES = [
    (strategy, policy)
    for strategy in STRATEGIES
    for policy in POLICIES
    if (strategy, policy) != ("reproducible", LOW_PRECISION)  # refused
]
RANKS = 8
LAYERS = 4
WIDTH = 64
# Powers of two, which `reproducible` needs.
FEW, MANY = 2, 4


@dataclass
class Counts:
    """What the host asks of the device.

    Attributes:
        launches: Number of launches by operator; a collective is one, called "c10d::" and its name.
        waits: Number of calls that make the host wait, by cause, even if the device is idle.
        reads: Number of values that the host waited for.
        pageable_copies: Number of copies from memory that is not pinned.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    pageable_copies: int = 0


class Model(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return module(batch).float().square().sum(), float(len(batch))


def build(layers: int = LAYERS, **options: Any) -> Engine:
    """Build an engine on the current GPU, whose parameters have all been used in a step."""
    engine = Engine(
        Model(layers),
        loss,
        lambda named: torch.optim.AdamW(named, fused=True),
        device="cuda",
        first_step_checks=False,
        max_norm=1.0,
        **options,
    )
    engine.step(batches(1))
    # Sums over fake ranks are wrong, so no step is applied.
    engine._setup.strategy.used.unused = []
    return engine


def batches(count: int) -> list[Tensor]:
    return [torch.ones(2, WIDTH, device="cuda") for _ in range(count)]


def steady_step(engine: Engine, microbatches: int) -> Counts:
    """Return the counts of the second of two equal steps, before which the device was idle."""
    from tests.fake_cuda import device

    given = batches(microbatches)
    engine.step(given)
    torch.cuda.synchronize()
    device.take_counters()
    with Collectives() as collectives:
        engine.step(given)
    found = device.take_counters()
    torch.cuda.synchronize()
    launches = Counter(f"c10d::{name}" for name in collectives.names())
    # The fake device counts collectives of its own process group by other names.
    launches += {name: n for name, n in found.launches.items() if not name.startswith("c10d::")}
    return Counts(launches, found.waits, found.reads, found.pageable_copies)


class FakeCollectives(TorchDispatchMode):
    """Replaces other ranks by fake collectives of real tensors; only `allgather_` writes data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            return communicate(func, args)
        return func(*args, **(kwargs or {}))


def steady_steps(
    *microbatches: int, ranks: int = RANKS, layers: int = LAYERS, **options: Any
) -> list[Counts]:
    """Return the counts of steps of rank 0 with these numbers of microbatches."""
    gc.collect()  # a step also covers the buffers of engines that are garbage
    with fake_ranks(ranks), FakeCollectives():
        engine = build(layers, **options)
        return [steady_step(engine, count) for count in microbatches]


@functools.cache
def measured(strategy: str, policy: str) -> tuple[Counts, Counts, Counts]:
    """Return the counts of steps of 1, `FEW` and `MANY` microbatches."""
    one, few, many = steady_steps(1, FEW, MANY, **STRATEGIES[strategy], policy=policy)
    return one, few, many


def parts(strategy: str, policy: str) -> dict[str, Counter[str]]:
    """Return the launches of the parts of a step that the budget limits."""
    one, few, many = (counts.launches for counts in measured(strategy, policy))
    return {"a step of one microbatch": one, f"{MANY - FEW} more microbatches": many - few}


def stored() -> dict[str, Any]:
    """Return the budget: the version of torch, and parts by strategy and policy."""
    found: dict[str, Any] = json.loads(BUDGET.read_text())
    return found


def main() -> int:
    # `reproducible` needs it from the start of the process.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    budget: dict[str, dict[str, Any]] = {strategy: {} for strategy in STRATEGIES}
    for strategy, policy in CASES:
        budget[strategy][policy] = found = parts(strategy, policy)
        totals = ", ".join(f"{counts.total()} in {name}" for name, counts in found.items())
        print(f"{strategy}, {policy}: {totals}")
    BUDGET.write_text(_text({"torch": TORCH, "launches": budget}) + "\n")
    print(f"saved to {BUDGET}")
    return 0


def _text(value: Any, indent: str = "") -> str:
    """Return JSON with the counts of a part on one line."""
    if not isinstance(value, dict) or isinstance(value, Counter):
        return json.dumps(value, sort_keys=True)
    inner = indent + " "
    entries = [f"{inner}{json.dumps(key)}: {_text(entry, inner)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


if __name__ == "__main__":
    sys.exit(main())
