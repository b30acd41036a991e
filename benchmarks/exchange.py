"""Count what sums over ranks cost from 8 to 1,024 ranks: `python -m benchmarks.exchange`.

Compares distmp's exchange of gradients with the one that it replaced: one all-to-all over all
ranks, and one kernel for each received shard. Rank 0 of machines with 8 ranks is simulated, as
`distmp explain` does, in a step with one microbatch:

- launches: operations that compute something, in the whole step and in the sums alone, with the
  blocks of a GPU.
- memory: bytes that the kernels of the sums read and write, per gradient element.
- network: bytes that a rank sends to other machines to reduce its gradients, per element. Each rank
  has a network card of its own.

Time: the sum of one bucket of 6 MiB on this CPU, both ways in turns. It takes two minutes on a CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.explain_memory import stepper
from benchmarks.report import in_turns, machine, save, sized
from benchmarks.tables import exchange as tables
from benchmarks.traffic import bytes_moved
from distmp.buckets import reduction
from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.commands.explain.trace_steps import CollectiveRecorder
from distmp.config import RunConfig, load
from distmp.scaling import norms

RANKS = sized((8, 64, 512, 1024), (8, 16))
RANKS_PER_MACHINE = 8
ELEMENTS = 3 * 2**19
ROUNDS = sized(7, 1)
COMMON = (
    f"--model.size={sized('22m', '1m')}",
    "--data.sequence-length=64",
    "--batch.microbatch-size=1",
    "--schedule.warmup-steps=0",
)
IN_16_BITS = "--precision.policy=bf16,reduce=bf16"
METHODS = {
    "`ddp`, `reduce=bf16`": ("--strategy=ddp", IN_16_BITS),
    "`fsdp`, `reduce=bf16`": ("--strategy=fsdp", IN_16_BITS),
    "`ddp`, `reproducible`": ("--strategy=ddp", "--precision.policy=bf16", "--reproducible=true"),
}

Sum = Callable[[Tensor, Tensor], None]


def main() -> int:
    torch.set_num_threads(1)
    methods: dict[str, dict[str, Any]] = {}
    for name, options in METHODS.items():
        for ranks in RANKS:
            config = configuration(options, ranks)
            found = {"before": count_before(config, ranks), "now": count(config, ranks)}
            methods.setdefault(name, {})[str(ranks)] = found
            print(ranks, name, found, flush=True)
    result = {
        "machine": machine(),
        "ranks_per_machine": RANKS_PER_MACHINE,
        "methods": methods,
        "milliseconds": {kind: _times(kind) for kind in ("bfloat16", "float32, pairwise")},
    }
    print(tables.exchange(result))
    print(f"saved to {save('exchange-cpu', result)}")
    return 0


def configuration(options: tuple[str, ...], ranks: int) -> RunConfig:
    """Return the configuration of a method on `ranks` ranks, with one microbatch per step."""
    return load([*COMMON, *options, f"--batch.global-batch-size={ranks}"])


def count(
    config: RunConfig, ranks: int, known_machine: int = RANKS_PER_MACHINE
) -> dict[str, float]:
    """Return launches and bytes of a step on the first of `ranks` ranks.

    Args:
        config: The configuration of the run.
        ranks: Number of ranks.
        known_machine: Number of ranks per machine in LOCAL_WORLD_SIZE; with `ranks`, distmp
            exchanges over all ranks at once.
    """
    with (
        mock.patch.dict(reduction.SUMS_PER_BLOCK, clear=True),
        mock.patch.dict(norms.ELEMENTS_PER_BLOCK, clear=True),
        simulate_ranks(ranks, known_machine),
    ):
        step = stepper(config, first_step_checks=False)  # they read values
        step()
        with CollectiveRecorder() as recorder, Costs() as costs, costs.of_sums():
            step()
    exchanges = [each for each in recorder.collectives if each.kind == "all-to-all"]
    # Rank 1 is in the group of the first hop, or of the only one.
    sent = sum(each.elements for each in exchanges if 1 in each.ranks)
    across = sum(each.bytes_between_machines(RANKS_PER_MACHINE) for each in exchanges)
    return {
        "launches": costs.launches,
        "launches_of_sums": costs.launches_of_sums,
        "memory": costs.bytes_of_sums / sent,
        "network": across / sent,
    }


def count_before(config: RunConfig, ranks: int) -> dict[str, float]:
    """Return what `count` does, for the exchange that distmp used before."""
    with (
        mock.patch.object(reduction, "sum_rows", sum_one_by_one),
        mock.patch.object(reduction, "sum_pairwise", sum_pairs_one_by_one),
    ):
        return count(config, ranks, known_machine=ranks)


def sum_one_by_one(pieces: Tensor, out: Tensor) -> None:
    """Add one row after the other."""
    out.copy_(pieces[0])
    for piece in pieces[1:]:
        out.add_(piece)


def sum_pairs_one_by_one(pieces: Tensor, out: Tensor) -> None:
    """Add rows along a binary tree, one launch for each pair."""
    rows = list(pieces.float().unbind())
    while len(rows) > 1:
        rows = [left.add_(right) for left, right in zip(rows[::2], rows[1::2], strict=True)]
    out.copy_(rows[0])


class Costs(TorchDispatchMode):
    """Counts launches, and memory traffic of sums over ranks.

    Attributes:
        launches: Number of operations that compute something.
        launches_of_sums: Those inside of sums over ranks.
        bytes_of_sums: Bytes that these read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.launches_of_sums = self.bytes_of_sums = 0
        self._in_sum = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.launches += 1
            if self._in_sum:
                self.launches_of_sums += 1
                self.bytes_of_sums += bytes_moved(func.overloadpacket, args, result)
        return result

    @contextmanager
    def of_sums(self) -> Iterator[None]:
        """Count the sums over ranks separately inside the context."""

        def watched(function: Sum) -> Sum:
            def sums(pieces: Tensor, out: Tensor) -> None:
                self._in_sum = True
                function(pieces, out)
                self._in_sum = False

            return sums

        with (
            mock.patch.object(reduction, "sum_rows", watched(reduction.sum_rows)),
            mock.patch.object(reduction, "sum_pairwise", watched(reduction.sum_pairwise)),
        ):
            yield


def _times(kind: str) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of both sums by number of ranks."""
    ways: dict[str, Sum] = (
        {"before": sum_one_by_one, "now": reduction.sum_rows}
        if kind == "bfloat16"
        else {"before": sum_pairs_one_by_one, "now": reduction.sum_pairwise}
    )
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    return {
        str(ranks): in_turns(
            list(ways),
            ROUNDS,
            lambda way, ranks=ranks: _time(ways[way], ranks, dtype),  # type: ignore[misc]
        )
        for ranks in RANKS
    }


def _time(function: Sum, ranks: int, dtype: torch.dtype) -> float:
    pieces = torch.randn(ranks, ELEMENTS // ranks).to(dtype)
    out = torch.empty(pieces.shape[1])
    started = time.process_time()
    function(pieces, out)
    return 1000 * (time.process_time() - started)


if __name__ == "__main__":
    sys.exit(main())
