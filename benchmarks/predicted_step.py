"""Predict steps of an 8 B model on H100s without one: `python -m benchmarks.predicted_step`.

distmp and FSDP2 by hand train the same model on a fake CUDA device (`tests/fake_cuda`), with fake
tensors and fake ranks. `benchmarks.recorded_step` records what they launch, and
`benchmarks.timeline` predicts when it runs. It needs a CPU build of torch and a C++ compiler, and
takes four minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    from tests.fake_cuda import preload  # noqa: F401  (before torch)

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import loops
from benchmarks.recorded_step import StepRecorder
from benchmarks.report import machine, save, sized
from benchmarks.tables import steps
from benchmarks.timeline import Operation, Rates, Timeline, simulate
from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.models.settings import ModelConfig
from distmp.parallel.settings import ParallelConfig

RANKS = sized((8, 64), (8,))
RANKS_PER_MACHINE = 8
SIZE = sized("8b", "1m")
VOCABULARY, TOKENS = 128_256, 8_192


class Work(loops.Work):
    """A model whose blocks are recomputed in backward."""

    def build(self) -> nn.Module:
        """Return the model with wrapped blocks."""
        model: Any = super().build()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
        return model


class Apart(loops.Fsdp2):
    """FSDP2 per block, with units for the embedding, and for norm and head, as in torchtitan."""

    def __init__(self, work: loops.Work, dtype: torch.dtype | None) -> None:
        with mock.patch.object(loops, "shard", shard_apart):
            super().__init__(work, dtype)


def shard_apart(model: Any, dtype: torch.dtype | None) -> Any:
    """Shard a model like `loops.shard`, with units of embedding and head."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(model.embedding, mp_policy=policy)
    fully_shard([model.norm, model.head], mp_policy=policy, reshard_after_forward=False)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def engine(work: loops.Work) -> loops.Loop:
    """Return the loop of distmp's engine, which recomputes blocks itself."""
    parallel = ParallelConfig(activation_checkpointing="blocks", microbatches=loops.MICROBATCHES)
    plain = loops.Work(*work)
    return loops.Distmp(plain, "bf16", "fsdp", parallel=parallel, first_step_checks=False)


METHODS: dict[str, Callable[[loops.Work], loops.Loop]] = {
    "FSDP2 by hand": lambda work: loops.Fsdp2(work, torch.bfloat16),
    "FSDP2 by hand, units of embedding and head": lambda work: Apart(work, torch.bfloat16),
    "distmp `fsdp`, `bf16`": engine,
}


class Recorded(NamedTuple):
    """What two steps launch.

    Attributes:
        operations: The operations of both, see `simulate`.
        second: Index of the first operation of the second step.
    """

    operations: list[Operation]
    second: int

    def step(self) -> Sequence[Operation]:
        """Return the operations of the second step."""
        return self.operations[self.second :]

    def total(self, kind: str, value: str = "nbytes") -> float:
        """Return the sum of a value over the operations of a kind in a step."""
        return sum(getattr(one, value) for one in self.step() if one.kind == kind)

    def launches(self) -> int:
        """Return the number of launches of a step."""
        return sum(one.kind != "wait" for one in self.step())


def record(
    method: Callable[[loops.Work], loops.Loop],
    ranks: int,
    model: ModelConfig,
    *,
    length: int = TOKENS,
    microbatches: int = 1,
) -> Recorded:
    """Record two steady steps of rank 0.

    Args:
        method: Builds a loop.
        ranks: Number of ranks, on machines of 8.
        model: Configuration of the model.
        length: Number of tokens of a microbatch.
        microbatches: Number of microbatches of a step.
    """
    recorder = StepRecorder()
    with (
        simulate_ranks(ranks, min(ranks, RANKS_PER_MACHINE)),
        mock.patch.object(loops, "MICROBATCHES", microbatches),
        recorder.watched_streams(),
    ):
        loop = method(Work(model, torch.device("cuda", 0), 1, length))
        loop.step()  # creates the state of the optimizer
        if isinstance(loop, loops.Distmp):
            # Sums over fake ranks are wrong: no step is applied, and no parameter counts as used.
            loop._engine._setup.strategy.used.unused = []
        with recorder:
            loop.step()
            second = len(recorder.operations)
            loop.step()
        return Recorded(recorder.operations, second)


def predicted(recorded: Recorded, rates: Rates) -> Timeline:
    """Return the timeline of the second step."""
    return simulate(recorded.operations, rates, recorded.second)


def main() -> int:
    arguments = _arguments()
    rates = Rates(launch=1e-6 * arguments.launch)
    options = {"vocabulary_size": VOCABULARY, "tied_head": False}
    model = ModelConfig(size=arguments.size, options=options)
    found: dict[str, dict[str, Any]] = {}
    for ranks in RANKS:
        for name, method in METHODS.items():
            recorded = record(method, ranks, model, microbatches=arguments.microbatches)
            timeline = predicted(recorded, rates)
            found.setdefault(str(ranks), {})[name] = row = {
                **{part: getattr(timeline, part) for part in ("seconds", "exposed", "idle")},
                "launches": recorded.launches(),
                "memory": recorded.total("kernel"),
                "sent": recorded.total("collective"),
                "flops": recorded.total("kernel", "flops"),
            }
            print(ranks, name, row, flush=True)
    result = {
        "machine": machine("cpu"),
        "rates": asdict(rates),
        "size": arguments.size,
        "tokens": TOKENS * arguments.microbatches,
        "ranks": found,
    }
    print(steps.predicted_step(result))
    print(f"saved to {save('predicted-step-cpu', result)}")
    return 0


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", default=SIZE, help="named size of the model")
    options.add_argument("--microbatches", type=int, default=1, help="microbatches of a step")
    options.add_argument(
        "--launch", type=float, default=1e6 * Rates().launch, help="host microseconds of a launch"
    )
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
