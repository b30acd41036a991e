"""Counts the memory traffic of copies and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
COUNTED = (aten._to_copy, aten.add, aten.add_, aten.clone, aten.copy_, aten.mul_, aten.zero_)
OVERWRITES = (aten.copy_, aten.zero_)  # do not read the tensor that they write to


class Traffic(TorchDispatchMode):
    """Counts the bytes that copies, sums and in-place products read and write in the context.

    It counts the tensors of each operation, as if it were one kernel without intermediate results.

    Args:
        elements: Counts only operations whose result has this many elements; None counts all.

    Attributes:
        bytes: The total.
    """

    def __init__(self, elements: int | None = None) -> None:
        super().__init__()
        self.bytes = 0
        self._elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in COUNTED and self._elements in (None, result.numel()):
            self.bytes += bytes_moved(func, args, result)
        return result


def bytes_moved(func: Any, args: Any, result: Any) -> int:
    """Return the bytes that an operation reads from its arguments and writes to its result."""
    read = args[1:] if func.overloadpacket in OVERWRITES else args
    return sum(leaf.nbytes for leaf in tree_leaves((result, read)) if isinstance(leaf, Tensor))
