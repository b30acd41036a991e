"""Counts the memory traffic of copies and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        operation = func.overloadpacket
        if operation in COUNTED and self._elements in (None, result.numel()):
            read = args[1:] if operation in OVERWRITES else args
            for tensor in (result, *read):
                if isinstance(tensor, Tensor):
                    self.bytes += tensor.numel() * tensor.element_size()
        return result
