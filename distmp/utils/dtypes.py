"""Names of floating-point types, and DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    if not is_traceable_wrapper_subclass(tensor):  # DTensor is one
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that this rank holds, detached: of a DTensor, its shard."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


# A type that gloo has, by size in bytes. A broadcast copies bits.
_SENT_AS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def as_sent(tensor: Tensor) -> Tensor:
    """Return a view that gloo can broadcast: it lacks 8-bit floats and some integer types."""
    known = tensor.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex())
    return tensor if known else tensor.view(_SENT_AS[tensor.itemsize])
