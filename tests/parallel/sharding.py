"""Tools to test sharded strategies: settings, batches for four ranks, observed dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.parallel import ParallelConfig
from distmp.parallel.settings import ShardingConfig

# Two microbatches on each of four ranks, with the same samples as FOUR_RANKS and ONE_RANK.
FOUR_BY_TWO = (
    ((2, 1), (3, 2), (1, 0), (4, 3)),
    ((5, 3), (1, 0), (0, 0), (0, 0)),
    ((1, 1), (1, 1), (3, 3), (2, 2)),
    ((0, 0), (5, 4), (1, 2), (0, 1)),
)


def sharded(strategy: str, **settings: Any) -> dict[str, Any]:
    """Return the engine's options of a strategy with settings of the section `sharding`."""
    return {
        "strategy": strategy,
        "parallel": ParallelConfig(sharding=ShardingConfig(**settings)),
    }


class Observed(TorchDispatchMode):
    """Records the dtypes of matrix products and collectives.

    Attributes:
        products: Dtypes of the factors of matrix products.
        collectives: Dtypes of the tensors of each c10d operation, by its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()
        self.collectives: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.products |= {tensor.dtype for tensor in tensors}
        if func.namespace == "c10d":
            self.collectives.setdefault(name, set()).update(tensor.dtype for tensor in tensors)
        return func(*args, **(kwargs or {}))

    def gathered(self) -> set[torch.dtype]:
        """Return the dtypes of gathered parameters; ranks compare their order in integers."""
        names = ("_allgather_base_", "allgather_")
        return {d for name in names for d in self.collectives.get(name, ()) if d.is_floating_point}
