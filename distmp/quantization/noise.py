"""Uniform random numbers that depend on a key and an index only."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def uniform(shape: torch.Size, key: Tensor) -> Tensor:
    """Return FP32 random numbers from 0 to below 1, a function of the key and the index.

    Args:
        shape: Shape of the result.
        key: int64, 0-dim, from 0 to below 2^32.
    """
    index = torch.arange(shape.numel(), dtype=torch.int64, device=key.device)
    mixed = _mix(_mix(index) ^ key)
    return (mixed >> 8).to(torch.float32).mul_(2.0**-24).reshape(shape)


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
