"""Counts the memory traffic of copies and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
COUNTED = (aten._to_copy, aten.add, aten.add_, aten.clone, aten.copy_, aten.mul_, aten.zero_)
# The operation that each of these runs on every element of its lists.
OF_LISTS = {aten._foreach_copy_: aten.copy_, aten._foreach_zero_: aten.zero_}
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
        operation, calls = func.overloadpacket, [(result, args)]
        if operation in OF_LISTS:
            operation, calls = (
                OF_LISTS[operation],
                [(each[0], each) for each in zip(*args[:2], strict=True)],
            )
        for written, read in calls:
            if operation in COUNTED and self._elements in (None, written.numel()):
                self.bytes += bytes_moved(operation, read, written)
        return result


def bytes_moved(operation: Any, args: Any, result: Any) -> int:
    """Return the bytes that an operation reads from its arguments and writes to its result."""
    read = args[1:] if operation in OVERWRITES else args
    return sum(leaf.nbytes for leaf in tree_leaves((result, read)) if isinstance(leaf, Tensor))
