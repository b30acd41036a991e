"""Norms of many tensors, read once at memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Number of elements per norm on the CPU: enough to keep a core busy.
CHUNK = 2**14


def chunk_norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norms of chunks of the tensors, in a fixed order.

    On the CPU torch computes the norm of a tensor on a single thread, at half the bandwidth of two,
    but distributes the rows of a matrix over all threads.

    Args:
        tensors: One or more dense tensors with the same device and dtype.

    Returns:
        1-dim, FP32 for 16-bit tensors, otherwise in their dtype. On CUDA one chunk per tensor.
    """
    dtype = torch.float32 if tensors[0].dtype.itemsize < 4 else tensors[0].dtype
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
    return torch.cat([norms for tensor in tensors for norms in _by_rows(tensor, dtype)])


def _by_rows(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    flat = tensor.reshape(-1)
    rows = flat.numel() // CHUNK * CHUNK
    if rows:
        yield torch.linalg.vector_norm(flat[:rows].view(-1, CHUNK), dim=1, dtype=dtype)
    if rows < flat.numel():
        yield torch.linalg.vector_norm(flat[rows:], dtype=dtype).view(1)
