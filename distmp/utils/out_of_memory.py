"""Recognizes out-of-memory errors."""

from __future__ import annotations

import torch

# Messages of errors that have no specific class: torch's host allocator, cuBLAS, NCCL and the
# CUDA driver.
_MESSAGES = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "cudaErrorMemoryAllocation",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that GPU or main memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
