"""Checksums of nested containers of tensors, to compare data between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Number of elements of each tensor that count.
COMPARED_ELEMENTS = 2**16
_PLAIN = (str, bytes, bool, int, float, complex, np.generic, type(None))


def checksum(tree: Any, describe: Callable[[object], str] = repr) -> int:
    """Return a checksum of nested containers, of 32 bits.

    Args:
        tree: Tensors, arrays, numbers and text in nested containers, see torch's pytrees. Of each
            tensor or array, the shape and the first `COMPARED_ELEMENTS` elements count.
        describe: Returns the text that counts for any other object.
    """
    value = 0
    for leaf in pytree.tree_leaves(tree):
        for part in _parts(leaf, describe):
            value = zlib.crc32(part, value)
    return value


def _parts(leaf: Any, describe: Callable[[object], str]) -> tuple[bytes, ...]:
    if isinstance(leaf, Tensor):
        start = leaf.detach().flatten()[:COMPARED_ELEMENTS].cpu().contiguous()
        return str(tuple(leaf.shape)).encode(), start.view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        start_of_array = np.ascontiguousarray(leaf.reshape(-1)[:COMPARED_ELEMENTS])
        return str(leaf.shape).encode(), start_of_array.tobytes()
    text = repr(leaf) if isinstance(leaf, _PLAIN) else describe(leaf)
    return (text.encode(errors="backslashreplace"),)
