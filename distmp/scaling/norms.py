"""Norms of many tensors in one read at memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements whose norm is taken as a whole on the CPU: enough to keep a core busy.
CHUNK = 2**14


def chunk_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of chunks that make up the tensors, in a fixed order.

    On the CPU torch takes the norm of a whole tensor on a single thread, at half the bandwidth of
    two; the rows of a matrix are spread over all threads.

    Args:
        tensors: One or more, dense, on one device and of one dtype.

    Returns:
        1-dim, FP32 for 16-bit tensors, otherwise of their dtype. One chunk per tensor on CUDA.
    """
    dtype = torch.float32 if tensors[0].dtype.itemsize < 4 else tensors[0].dtype
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
    return torch.cat([norms for tensor in tensors for norms in _by_rows(tensor, dtype)])


def _by_rows(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    flat = tensor.reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    if whole:
        yield torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK), dim=1, dtype=dtype)
    if whole < flat.numel():
        yield torch.linalg.vector_norm(flat[whole:], dtype=dtype).view(1)
