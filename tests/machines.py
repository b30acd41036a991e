"""Ranks that pretend to be on several machines, and the bytes that they send between them."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.commands.explain.trace_steps import group_ranks


def pretend(ranks_per_machine: int, local_rank: int | None = None) -> None:
    """Set the variables of torchrun, in the process of a rank."""
    rank = dist.get_rank()
    own = rank % ranks_per_machine if local_rank is None else local_rank
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks_per_machine), LOCAL_RANK=str(own))


class AllToAllTraffic(TorchDispatchMode):
    """Counts the bytes that this rank sends by all-to-all.

    Attributes:
        inside: Bytes to other ranks of this machine.
        across: Bytes to ranks of other machines.
    """

    def __init__(self, ranks_per_machine: int) -> None:
        super().__init__()
        self._ranks_per_machine = ranks_per_machine
        self.inside = self.across = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "alltoall_base_":
            sent = next(leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
            own, members = dist.get_rank(), group_ranks(args)
            for rank in members:
                same = rank // self._ranks_per_machine == own // self._ranks_per_machine
                self.inside += (same and rank != own) * sent.nbytes // len(members)
                self.across += (not same) * sent.nbytes // len(members)
        return func(*args, **(kwargs or {}))
