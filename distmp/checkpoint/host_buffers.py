"""Host memory that the snapshots of a run are copied to, pinned if a GPU writes to it."""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from distmp.distributed.ranks import describe
from distmp.utils.cgroups import free_host_bytes
from distmp.utils.units import bytes_text

logger = logging.getLogger("distmp")

# Buffers of this size or larger are allocated by `mmap` and pinned in place: torch's allocator of
# pinned memory rounds up to a power of two. For smaller tensors a call of the driver costs more.
PINNED_IN_PLACE_BYTES = 1 << 20
# Host memory that pinning leaves free: pinned memory cannot be swapped.
SPARE_BYTES = 1 << 30

# Note [Lifetime of host memory]
# `HostBuffers` keeps the buffers from one snapshot to the next, since allocating and pinning take
# longer than copying: seconds for 10 GB. The writer therefore has at most one snapshot pending, and
# joins its thread before it takes the next one. Pinned memory is unregistered when its tensor is
# collected, but not at interpreter exit: the CUDA driver may be shut down by then.


class HostBuffer(NamedTuple):
    """A tensor in host memory.

    Attributes:
        tensor: The tensor, contiguous, in a storage of its own.
        pinned: Whether a GPU can copy to it while the host continues.
    """

    tensor: Tensor
    pinned: bool


class HostBuffers:
    """Host memory that all snapshots of a run reuse."""

    def __init__(self) -> None:
        # By the name of a tensor, and the index of its part.
        self._buffers: dict[tuple[str, int], HostBuffer] = {}
        self._has_failed = False

    def like(self, name: str, part: int, source: Tensor) -> HostBuffer:
        """Return the buffer for a part of the tensor `name`, with shape and dtype of `source`.

        If memory for a tensor on a GPU cannot be pinned, this is logged once, and all further
        buffers are pageable: the writing thread then waits for their copies.
        """
        buffer = self._buffers.get((name, part))
        if buffer is None or (buffer.tensor.shape, buffer.tensor.dtype) != _kind(source):
            self._buffers.pop((name, part), None)
            buffer = self._buffers[name, part] = self._allocated(source)
        return buffer

    def clear(self) -> None:
        """Release all memory that no snapshot uses."""
        self._buffers.clear()

    def _allocated(self, source: Tensor) -> HostBuffer:
        shape, dtype = _kind(source)
        if _is_on_gpu(source) and not self._has_failed:
            try:
                return HostBuffer(_pinned(shape, dtype), pinned=True)
            except (MemoryError, OSError, RuntimeError) as error:
                self._has_failed = True
                logger.warning(
                    "host memory for checkpoints of %s is not pinned, so the update after each "
                    "save waits longer for its copy (%s); free host memory, or set "
                    "checkpoint.asynchronous to false",
                    source.device,
                    describe(error),
                )
        return HostBuffer(torch.empty(shape, dtype=dtype), pinned=False)


def _kind(source: Tensor) -> tuple[torch.Size, torch.dtype]:
    return source.shape, source.dtype


def _is_on_gpu(source: Tensor) -> bool:
    return source.is_cuda


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return pinned memory.

    Raises:
        MemoryError: If the machine has too little free memory.
    """
    size = shape.numel() * dtype.itemsize
    if size < PINNED_IN_PLACE_BYTES:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    if (free := free_host_bytes()) < size + SPARE_BYTES:
        raise MemoryError(f"{bytes_text(size)} needed, {bytes_text(free)} free")
    # In pages of its own: memory is pinned in whole pages.
    return _register(torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape))


def _register(tensor: Tensor) -> Tensor:
    """Pin the memory of a tensor until it is collected; see Note [Lifetime of host memory]."""
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 1)))
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
    return tensor
