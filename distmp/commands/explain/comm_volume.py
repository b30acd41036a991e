"""What a rank sends in one step, counted from the collectives that the engine starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# By the name of c10d's operation: what people call it, and the bytes that a rank of n sends for
# each byte of the whole (ring algorithms; of an all-to-all every rank keeps its own part).
KINDS = {
    "allreduce_": ("all-reduce", 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "_allgather_base_": ("all-gather", 1),
    "allgather_": ("all-gather", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 1),
}


class Sent(NamedTuple):
    """One collective.

    Attributes:
        kind: What it is called.
        dtype: What travels.
        elements: Of the whole: what is reduced, gathered, exchanged.
        ranks: Ranks that take part.
        microbatch: In which microbatch of the step it was started, from 0.
        updated: Whether it comes after the optimizer's step.
    """

    kind: str
    dtype: torch.dtype
    elements: int
    ranks: int
    microbatch: int
    updated: bool

    @property
    def nbytes(self) -> float:
        """Bytes that a rank sends."""
        factor = next(factor for kind, factor in KINDS.values() if kind == self.kind)
        return factor * (self.ranks - 1) / self.ranks * self.elements * self.dtype.itemsize


class Wire(TorchDispatchMode):
    """Notes the collectives that are started inside of it.

    Attributes:
        sent: They, in order.
        microbatch: The microbatch that is under way.
        updated: Whether the optimizer has stepped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.microbatch = 0
        self.updated = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in KINDS:
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            ranks = _group_size(args)
            # A base operation has (output, input), a list operation (outputs, inputs): the larger
            # side is the whole.
            if name == "allgather_":
                elements = sum(tensor.numel() for tensor in pytree.tree_leaves(args[0]))
            elif name in ("allreduce_", "broadcast_"):
                elements = sum(tensor.numel() for tensor in tensors)
            else:
                elements = max(tensor.numel() for tensor in tensors)
            self.sent.append(
                Sent(
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
        """Begin a step."""
        self.sent, self.microbatch, self.updated = [], 0, False


class Traffic(NamedTuple):
    """Collectives of one kind in a step.

    Attributes:
        purpose: What travels.
        kind: The collective.
        dtype: In which type.
        calls: How many in a step.
        nbytes: What a rank sends in a step.
    """

    purpose: str
    kind: str
    dtype: torch.dtype
    calls: int
    nbytes: int


def traffic(sent: Iterable[Sent], microbatches: int, *, shards: bool) -> list[Traffic]:
    """Sum up a step of `microbatches` from one in which only as many as three were run.

    Args:
        sent: The collectives of a step with `min(microbatches, 3)` microbatches; the second of
            three stands for all between the first and the last.
        microbatches: Of a step.
        shards: Whether the strategy shards parameters, and so gathers them.
    """
    found: dict[tuple[str, str, torch.dtype], tuple[int, float]] = {}
    for one in sent:
        if one.ranks == 1:
            continue
        times = microbatches - 2 if microbatches > 3 and one.microbatch == 1 else 1
        key = (_purpose(one, shards=shards), one.kind, one.dtype)
        calls, total = found.get(key, (0, 0.0))
        found[key] = calls + times, total + times * one.nbytes
    return [Traffic(*key, calls, round(total)) for key, (calls, total) in found.items()]


def _purpose(sent: Sent, *, shards: bool) -> str:
    if sent.kind == "broadcast":
        return "module buffers"
    if sent.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "decision" if sent.dtype == torch.float64 else "agreement"
    if sent.kind == "all-gather" and (shards or sent.updated):
        return "parameters"
    return "gradients"


def _group_size(args: Any) -> int:
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf).size()
    return dist.get_world_size()
