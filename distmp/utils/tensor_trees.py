"""Applies functions to the tensors in nested containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from distmp.utils.dtypes import dtype_name

# Longer lists are data, such as token ids.
_MOST_DESCRIBED = 8
_PLAIN = (type(None), bool, int, float, str)


def described(tree: Any) -> str:
    """Return tensors with shapes and dtypes as text, such as `{inputs: int64 [4, 16]}`."""
    if isinstance(tree, Tensor):
        return f"{dtype_name(tree.dtype)} {list(tree.shape)}"
    if isinstance(tree, Mapping):
        entries = ", ".join(f"{key}: {described(value)}" for key, value in tree.items())
        return f"{{{entries}}}"
    if isinstance(tree, (tuple, list)) and len(tree) <= _MOST_DESCRIBED:
        return f"{type(tree).__name__} of {', '.join(map(described, tree))}"
    return type(tree).__name__ + (f" of {len(tree)}" if isinstance(tree, Sized) else "")


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return nested containers with each tensor replaced by the result of a function.

    Args:
        function: Called with each tensor.
        tree: A tensor, or nested containers of tensors and other objects, see torch's pytrees.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    # Common types without pytree, which takes longer than to launch several kernels: modules whose
    # inputs are cast would spend that in every forward.
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind in (tuple, list):
        return kind([map_tensors(function, item) for item in tree])
    if kind is dict:
        return {key: map_tensors(function, item) for key, item in tree.items()}
    return pytree.tree_map_only(Tensor, function, tree)
