"""The memory of the host: returns what is free, and recognizes errors of exhausted memory."""

from __future__ import annotations

import ctypes

import torch


def return_freed_memory() -> None:
    """Return to the system the freed memory that glibc keeps.

    glibc keeps freed tensors of up to 32 MiB in its heap, and steps reuse them. The start of a run
    and a load free more than a step needs. Takes milliseconds, so call it once and not in every
    step. Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
