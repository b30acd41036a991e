"""Runs code on tensors that have shapes, dtypes and a device, but no memory and no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Integer tensors up to this size (counts, token ids of a batch, bucket orders) are real, because
# the host may read them.
MAX_REAL_ELEMENTS = 2**20

aten = torch.ops.aten


class FakeTensors(TorchDispatchMode):
    """Makes floating-point and large tensors that are created inside of it fake."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._pin_memory.default and isinstance(args[0], FakeTensor):
            return args[0]
        if not tensors and self._is_large(func, args, kwargs):
            with self._fake:
                return func(*args, **kwargs)
        if func is aten.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        if not func._schema.returns and any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return None  # a fused optimizer, which writes in place
        return func(*args, **kwargs)

    def _is_large(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a factory creates a tensor of the model, and not a small one for the host."""
        with self._fake:
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return False
        return (result.is_floating_point() and result.dim() > 0) or (
            result.numel() > MAX_REAL_ELEMENTS
        )


def _without_masks(indices: Any) -> list[Any]:
    """Replace real masks by indices, because fake tensors cannot be indexed with a mask."""
    result: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
        if is_mask and not isinstance(index, FakeTensor):
            result.extend(index.nonzero().unbind(1))
        else:
            result.append(index)
    return result
