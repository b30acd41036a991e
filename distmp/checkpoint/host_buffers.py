"""Host memory that the snapshots of a run are copied to, pinned if a GPU writes to it."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import weakref
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from distmp.distributed.ranks import describe
from distmp.utils.cgroups import free_host_bytes
from distmp.utils.processes import lower_priority
from distmp.utils.units import bytes_text

logger = logging.getLogger("distmp")

# Buffers of this size or larger are allocated by `mmap` and pinned in place: torch's allocator of
# pinned memory rounds up to a power of two. For smaller tensors a call of the driver costs more.
PINNED_IN_PLACE_BYTES = 1 << 20
# The pinning thread can be stopped after each piece of memory of this size.
PIECE_BYTES = 64 << 20
# Host memory that pinning leaves free: pinned memory cannot be swapped.
SPARE_BYTES = 1 << 30

# Note [Pinning in the background]
# Pinning takes seconds for 10 GB: the system clears each page, and the driver locks it. A separate
# thread does this after the first step, usually long before the first save.
#
# A snapshot never waits for that thread. Where no pinned memory is ready (the first save comes too
# early, a tensor has another shape than before, or pinning failed), the snapshot gets pageable
# memory, to which the writing thread copies. Waiting would be no faster, since the pages have to be
# cleared in both cases. After the save, the pageable memory is released, and pinned memory replaces
# it for the next save.
#
# - The two threads never use the same memory: the pinning thread allocates its own, and publishes a
#   buffer when it is pinned.
# - While a snapshot is pending, pinning stops, so that pageable and pinned memory together hold at
#   most one copy of the state, plus the buffer that is being pinned.
# - The pages are cleared before `cudaHostRegister`: the driver would do this while it holds a lock
#   that kernel launches of the training thread need.
# - An error of pinning is reported once; then all saves use pageable memory.

# Note [Lifetime of host memory]
# `HostBuffers` keeps the buffers from one snapshot to the next, since allocating and pinning take
# longer than copying. The writer therefore has at most one snapshot pending, and joins its thread
# before it takes the next one. Pinned memory is unregistered when its tensor is collected, but not
# at interpreter exit: the CUDA driver may be shut down by then.


class HostBuffer(NamedTuple):
    """A tensor in host memory.

    Attributes:
        tensor: The tensor, contiguous, in a storage of its own.
        pinned: Whether a GPU can copy to it while the host continues.
    """

    tensor: Tensor
    pinned: bool


class _Spec(NamedTuple):
    """Shape and dtype of a buffer."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> _Spec:
        return cls(tensor.shape, tensor.dtype)


# Name of a tensor, and index of its part.
_Key: TypeAlias = tuple[str, int]


class HostBuffers:
    """Host memory that all snapshots of a run reuse.

    All methods are called in the training thread. None waits for pinning, except `close`. See Note
    [Pinning in the background].
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, HostBuffer] = {}
        # The buffers that receive copies from a GPU.
        self._to_pin: dict[_Key, _Spec] = {}
        self._device: torch.device | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._has_failed = False

    def expect(self, name: str, part: int, source: Tensor) -> None:
        """Let `start_pinning` pin memory for a part of the tensor `name`, if it is on a GPU."""
        if _is_on_gpu(source):
            with self._lock:
                self._device = source.device
                self._to_pin[name, part] = _Spec.of(source)

    def like(self, name: str, part: int, source: Tensor) -> HostBuffer:
        """Return the buffer for a part of the tensor `name`, with shape and dtype of `source`."""
        self.expect(name, part, source)
        spec = _Spec.of(source)
        with self._lock:
            buffer = self._buffers.get((name, part))
            if buffer is None or _Spec.of(buffer.tensor) != spec:
                buffer = HostBuffer(_pageable(spec), pinned=False)
                self._buffers[name, part] = buffer
            return buffer

    def start_pinning(self) -> None:
        """Pin missing memory in a thread, and release the pageable memory that it replaces.

        Call it while no snapshot is pending.
        """
        if self._has_failed:
            return
        with self._lock:
            missing = {
                key: spec for key, spec in self._to_pin.items() if not self._is_pinned(key, spec)
            }
            for key in missing:
                self._buffers.pop(key, None)
        if not missing:
            return
        self.stop_pinning()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._pin,
            args=(missing, self._stop, self._thread),
            name="pinning of memory for checkpoints",
            daemon=True,  # a driver call that hangs must not keep a failed rank alive
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # this process can start no more threads
            self._thread = None
            self._fail(error)

    def stop_pinning(self) -> None:
        """Ask the pinning thread to end; memory that is not pinned yet stays pageable."""
        self._stop.set()

    def close(self, timeout: float | None) -> None:
        """End the pinning thread, and release all memory that no snapshot uses.

        Args:
            timeout: How long to wait for the thread, in seconds; None waits until it ends. If it
                does not end in time, it releases the memory that it has pinned.
        """
        self.stop_pinning()
        with self._lock:
            self._to_pin.clear()
            self._buffers.clear()
        if self._thread is not None:
            self._thread.join(timeout)

    def _is_pinned(self, key: _Key, spec: _Spec) -> bool:
        buffer = self._buffers.get(key)
        return buffer is not None and buffer.pinned and _Spec.of(buffer.tensor) == spec

    def _pin(
        self,
        missing: dict[_Key, _Spec],
        stop: threading.Event,
        previous: threading.Thread | None,
    ) -> None:
        """Pin memory, in the pinning thread."""
        if previous is not None:
            previous.join()
        try:
            lower_priority()
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread uses the first device
            for key, spec in missing.items():
                if stop.is_set():
                    return
                if not self._is_pinned(key, spec):  # by the previous thread
                    self._publish(key, _pinned(spec, stop))
        except (MemoryError, OSError, RuntimeError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Keep what is pinned, pin nothing more, and say so."""
        self._has_failed = True
        logger.warning(
            "host memory for checkpoints of %s is not pinned, so the update after each save "
            "waits longer for its copy (%s); free host memory, or set checkpoint.asynchronous "
            "to false",
            self._device,
            describe(error),
        )

    def _publish(self, key: _Key, tensor: Tensor | None) -> None:
        with self._lock:
            # Dropped if the buffers were closed, or if another shape is expected now.
            if tensor is not None and self._to_pin.get(key) == _Spec.of(tensor):
                self._buffers[key] = HostBuffer(tensor, pinned=True)


def _is_on_gpu(source: Tensor) -> bool:
    return source.is_cuda


def _pageable(spec: _Spec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype)


def _pinned(spec: _Spec, stop: threading.Event) -> Tensor | None:
    """Return pinned memory; None if `stop` was set before it was ready.

    Raises:
        MemoryError: If the machine has too little free memory.
    """
    if spec.nbytes < PINNED_IN_PLACE_BYTES:
        return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=True)
    if (free := free_host_bytes()) < spec.nbytes + SPARE_BYTES:
        raise MemoryError(f"{bytes_text(spec.nbytes)} needed, {bytes_text(free)} free")
    tensor = _page_aligned(spec)
    return _register(tensor) if _clear(tensor, stop) else None


def _page_aligned(spec: _Spec) -> Tensor:
    """Return a tensor in pages of its own: memory is pinned in whole pages."""
    flat = torch.frombuffer(mmap.mmap(-1, spec.nbytes), dtype=spec.dtype)
    return flat.view(spec.shape)


def _clear(tensor: Tensor, stop: threading.Event) -> bool:
    """Write zeros piece by piece, without the interpreter lock; return False if `stop` was set."""
    for start in range(0, tensor.nbytes, PIECE_BYTES):
        if stop.is_set():
            return False
        ctypes.memset(tensor.data_ptr() + start, 0, min(PIECE_BYTES, tensor.nbytes - start))
    return True


def _register(tensor: Tensor) -> Tensor:
    """Pin the memory of a tensor until it is collected; see Note [Lifetime of host memory]."""
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 1)))
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
    return tensor
