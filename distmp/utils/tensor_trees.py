"""Applies functions to the tensors in nested containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = (type(None), bool, int, float, str)


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
