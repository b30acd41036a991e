"""Communication volume of one step, counted from the collectives that the engine starts.

Bytes are those of ring algorithms; an all-to-all sends each peer its part. Rank r is on machine
r // ranks_per_machine. A ring passes through all ranks of a machine before it leaves it, so one of
these ranks sends to another machine. Libraries use one ring per network card, so each rank of the
machine has the same share of that traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Name of the c10d operation: name of the collective, and its cost factor. With a ring algorithm on
# n ranks, a rank sends factor * (n - 1) / n bytes for each byte of the full tensor.
KINDS = {
    "allreduce_": ("all-reduce", 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "_allgather_base_": ("all-gather", 1),
    "allgather_": ("all-gather", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 1),
}


class Collective(NamedTuple):
    """One collective.

    Attributes:
        kind: Name of the collective, such as "all-reduce".
        dtype: Communication dtype.
        elements: Number of elements of the full tensor.
        ranks: The ranks of the group. Rank 0, whose bytes are counted, is one of them.
        microbatch: Microbatch of the step in which it was started, from 0; -1 before the first.
        updated: Whether it was started after the optimizer's step.
    """

    kind: str
    dtype: torch.dtype
    elements: int
    ranks: Sequence[int]
    microbatch: int
    updated: bool

    @property
    def nbytes(self) -> float:
        """Number of bytes that a rank sends."""
        factor = next(factor for kind, factor in KINDS.values() if kind == self.kind)
        ranks = len(self.ranks)
        return factor * (ranks - 1) / ranks * self.elements * self.dtype.itemsize

    def bytes_between_machines(self, ranks_per_machine: int) -> float:
        """Return how many of `nbytes` leave the machine, averaged over its ranks in the group."""
        here = sum(rank < ranks_per_machine for rank in self.ranks)
        elsewhere = len(self.ranks) - here
        if elsewhere == 0:
            return 0.0
        if self.kind == "all-to-all":
            return self.nbytes * elsewhere / (len(self.ranks) - 1)
        return self.nbytes / here


class CollectiveRecorder(TorchDispatchMode):
    """Records the collectives that are started inside of it.

    Attributes:
        collectives: The recorded collectives, in order.
        microbatch: The current microbatch of the step, set by the caller.
        updated: Whether the optimizer has stepped, set by the caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.microbatch = 0
        self.updated = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in KINDS:
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            ranks = group_ranks(args)
            # Base operations take (output, input), list operations (outputs, inputs): the larger
            # side is the full tensor.
            if name == "allgather_":
                elements = sum(tensor.numel() for tensor in pytree.tree_leaves(args[0]))
            elif name in ("allreduce_", "broadcast_"):
                elements = sum(tensor.numel() for tensor in tensors)
            else:
                elements = max(tensor.numel() for tensor in tensors)
            self.collectives.append(
                Collective(
                    KINDS[name][0],
                    tensors[0].dtype,
                    elements,
                    ranks,
                    self.microbatch,
                    self.updated,
                )
            )
        return func(*args, **(kwargs or {}))

    def start(self) -> None:
        """Start recording a new step."""
        self.collectives, self.microbatch, self.updated = [], -1, False


@dataclass(frozen=True)
class CommVolume:
    """The collectives of one kind in a step.

    Attributes:
        purpose: What is communicated, such as "gradients".
        kind: Name of the collective.
        dtype: Communication dtype.
        calls: Number of calls in a step.
        nbytes: Number of bytes that a rank sends in a step.
        between_machines: How many of them leave the machine: the bytes that each network card sends
            if a machine has one for each rank.
    """

    purpose: str
    kind: str
    dtype: torch.dtype
    calls: int
    nbytes: int
    between_machines: int


def comm_volumes(
    collectives: Iterable[Collective], microbatches: int, ranks_per_machine: int, *, shards: bool
) -> list[CommVolume]:
    """Extrapolate the volume of a step with `microbatches` from a step with at most three.

    Args:
        collectives: The collectives of a step with `min(microbatches, 3)` microbatches; the second
            of three represents all microbatches between the first and the last.
        microbatches: Number of microbatches per step.
        ranks_per_machine: Number of ranks on each machine.
        shards: Whether the strategy shards parameters, and therefore gathers them.
    """
    totals: dict[tuple[str, str, torch.dtype], tuple[int, float, float]] = {}
    for collective in collectives:
        if len(collective.ranks) == 1:
            continue
        times = microbatches - 2 if microbatches > 3 and collective.microbatch == 1 else 1
        key = (_purpose(collective, shards=shards), collective.kind, collective.dtype)
        calls, sent, left = totals.get(key, (0, 0.0, 0.0))
        totals[key] = (
            calls + times,
            sent + times * collective.nbytes,
            left + times * collective.bytes_between_machines(ranks_per_machine),
        )
    return [
        CommVolume(*key, calls, round(sent), round(left))
        for key, (calls, sent, left) in totals.items()
    ]


def _purpose(collective: Collective, *, shards: bool) -> str:
    if collective.kind == "broadcast":
        return "module buffers"
    if collective.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "decision" if collective.dtype == torch.float64 else "agreement"
    if collective.kind == "all-gather" and (shards or collective.updated):
        return "parameters"
    return "gradients"


def group_ranks(args: Any) -> Sequence[int]:
    """Return the ranks of the group of a c10d operation, from its arguments."""
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf))
    return range(dist.get_world_size())
