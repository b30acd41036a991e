"""Norms of many tensors, read once at memory bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from distmp.utils.host_copy import cpu_number

# Number of elements per norm on the CPU: enough to keep a core busy.
CHUNK = 2**14
# Number of elements that are copied at once to scale them.
_BLOCK = 64 * CHUNK
# FP32 sums of squares are precise for norms from here on, even if small squares become zero.
_PRECISE_FROM = 2.0**-40


def chunk_norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norms of chunks of the tensors, in a fixed order; finite for finite values.

    On the CPU torch computes the norm of a tensor on a single thread, at half the bandwidth of two,
    but distributes the rows of a matrix over all threads. Sums in FP64 take 20 times as long there,
    so only squares that FP32 cannot represent are computed again.

    Args:
        tensors: One or more dense tensors with the same device and dtype.

    Returns:
        1-dim, FP64. On CUDA one chunk per tensor.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    norms = torch.cat([norms for tensor in tensors for norms in _by_rows(tensor)]).double()
    if _PRECISE_FROM <= cpu_number(norms.amax()) < math.inf:
        return norms
    return _of_scaled(tensors, norms)


def _by_rows(tensor: Tensor) -> Iterator[Tensor]:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    flat = tensor.reshape(-1)
    rows = flat.numel() // CHUNK * CHUNK
    if rows:
        yield torch.linalg.vector_norm(flat[:rows].view(-1, CHUNK), dim=1, dtype=dtype)
    if rows < flat.numel():
        yield torch.linalg.vector_norm(flat[rows:], dtype=dtype).view(1)


def _of_scaled(tensors: list[Tensor], norms: Tensor) -> Tensor:
    """Compute norms of values that are multiplied by a power of two, which makes the largest 1."""
    limits = torch.stack([limit.double() for tensor in tensors for limit in tensor.aminmax()])
    largest = cpu_number(limits.abs().amax())
    if not 0 < largest < math.inf:
        return norms
    exponent = max(math.frexp(largest)[1], -126)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    parts = (
        part
        for tensor in tensors
        for block in tensor.reshape(-1).split(_BLOCK)
        for part in _by_rows(block.to(dtype) * 2.0**-exponent)
    )
    return torch.cat([*parts]).double() * 2.0**exponent
