"""Counts what sums over ranks cost in a step, on rank 0 of simulated machines with 8 ranks.

- launches: operations that compute something, in the whole step and in the sums alone, with the
  blocks of a GPU.
- memory: bytes that the kernels of the sums read and write, per gradient element.
- network: bytes that a rank sends to other machines to reduce its gradients, per element. Each rank
  has a network card of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.growth import stepper
from benchmarks.traffic import bytes_moved
from distmp.buckets import reduction
from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.commands.explain.trace_steps import CollectiveRecorder
from distmp.config import RunConfig
from distmp.scaling import norms

RANKS_PER_MACHINE = 8

Sum = Callable[[Tensor, Tensor], None]


def count(config: RunConfig, ranks: int) -> dict[str, float]:
    """Return launches and bytes of a step on the first of `ranks` ranks."""
    with (
        mock.patch.dict(reduction.SUMS_PER_BLOCK, clear=True),
        mock.patch.dict(norms.ELEMENTS_PER_BLOCK, clear=True),
        simulate_ranks(ranks, RANKS_PER_MACHINE),
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
