"""Copies a run's state to host memory, from which it is written while training continues.

A rank copies only what it writes: its own shards, and its share of the replicated tensors. See
Note [Copying while training continues] for streams and order, and Note [Lifetime of host memory].
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import threading
import weakref
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.distributed.failing_together import describe
from distmp.errors import CheckpointError
from distmp.utils.flat_shard import FlatShard
from distmp.utils.processes import free_host_bytes
from distmp.utils.units import bytes_text

logger = logging.getLogger("distmp")

# Buffers of this size or larger are allocated by `mmap` and pinned in place: torch's allocator of
# pinned memory rounds up to a power of two. For smaller tensors a call of the driver costs more.
PINNED_IN_PLACE_BYTES = 1 << 20
# Host memory that pinning leaves free: pinned memory cannot be swapped.
SPARE_BYTES = 1 << 30
# How long a snapshot waits for `release` once it is copied. A change of a tensor while it is copied
# ends, and changes the version of the tensor, in less time.
SETTLED_SECONDS = 2.0

# Note [Lifetime of host memory]
# `HostBuffers` keeps the buffers from one snapshot to the next, since allocating and pinning take
# longer than copying: seconds for 10 GB. The writer therefore has at most one snapshot pending, and
# joins its thread before it takes the next one. Pinned memory is unregistered when its tensor is
# collected, but not at interpreter exit: the CUDA driver may be shut down by then.


class HostBuffer(NamedTuple):
    """A tensor in host memory.

    Attributes:
        tensor: The tensor, contiguous, in a separate storage.
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
    # In separate pages, because memory is pinned page by page.
    return _register(torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape))


def _register(tensor: Tensor) -> Tensor:
    """Pin the memory of a tensor until it is collected; see Note [Lifetime of host memory]."""
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 1)))
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
    return tensor


# Note [Copying while training continues]
# Weights and optimizer state are almost all of the state, and only the optimizer's update changes
# them. So they are "held": copied while the next step runs forward and backward, and only its
# update waits for the end of the copy. Buffers of the model and counts may change at any time; they
# are small and copied before `Snapshot` returns (on CUDA: enqueued on the current stream; the host
# waits for copies to memory that is not pinned yet).
#
#     training thread   Snapshot()   forward, backward    release()   update
#     writing thread                 complete() ------------------>   writes the copies
#     CUDA side stream               device-to-host copies
#
# Order on CUDA: the side stream first waits for the current stream, whose last update may still be
# running, then copies; `release` makes the current stream wait for an event recorded after
# the copies. The host waits for neither: the update is enqueued immediately and starts after the
# copies. Only the writing thread synchronizes with the event, before it reads host memory.
#
# Other copies read host memory, or copy from CUDA to memory that is not pinned yet. `complete`
# makes them in the writing thread (from CUDA on the side stream, for which the thread waits), and
# `release` blocks the training thread until they are done. `_copied` and `_released` are separate
# events since each thread waits for the other: the update waits for the copy, and the writing
# thread waits for `release`, which compares the versions of the sources. A source that was changed
# before that makes the snapshot invalid: it would mix two steps. An operation changes the version
# when it ends, so the writing thread does not compare immediately after the copy. But an update may
# never follow, so that thread calls `release` itself after `SETTLED_SECONDS`.
#
# The sources are alive while they are copied, as the optimizer and the model hold them; `complete`
# drops its references to them, so that a snapshot that waits for the disk does not keep a replaced
# tensor alive.


class HostParts(Tensor):
    """Parts of a tensor in host memory, which torch.distributed.checkpoint (DCP) writes.

    The tensor itself is empty. It returns to DCP the write items that the DTensor or `FlatShard`
    returned.

    Attributes:
        items: DCP's write items.
        parts: The values of each item, contiguous, with the dtype of the tensor. Each has its own
            storage: DCP copies a tensor that is a view of a larger storage, and keeps all copies
            until a file is written.
    """

    items: list[Any]
    parts: list[Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(items: list[Any], parts: list[Tensor]) -> HostParts:
        """Return a tensor with one part for each item."""
        tensor = torch.Tensor._make_subclass(HostParts, torch.empty(0, dtype=parts[0].dtype))
        tensor.items, tensor.parts = items, parts
        return tensor

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        return self.items

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for item, part in zip(self.items, self.parts, strict=True):
            if item.index.offset == index.offset:
                return part
        raise ValueError(f"no part of {index.fqn!r} begins at {index.offset}")


class _Copy(NamedTuple):
    """A copy that may not have ended yet.

    Attributes:
        name: Name of the tensor.
        source: The live tensor.
        buffer: The buffer in host memory, with shape and dtype of `source`.
        version: Version counter of `source` when the copy was enqueued.
    """

    name: str
    source: Tensor
    buffer: HostBuffer
    version: int

    @property
    def is_asynchronous(self) -> bool:
        """Whether the copy is asynchronous on the device; otherwise a host thread waits for it."""
        return self.source.is_cuda and self.buffer.pinned

    def start(self) -> None:
        """Copy, or enqueue the copy on the current stream."""
        self.buffer.tensor.copy_(self.source, non_blocking=self.is_asynchronous)


class Snapshot:
    """A copy of the state at one step, which completes while training continues.

    The training thread calls `release` before a held tensor changes. The writing thread calls
    `complete` to get the copy. See Note [Copying while training continues].

    Args:
        tensors: Live tensors that this rank writes, by name.
        held: Names of the tensors that do not change before `release` is called.
        buffers: Memory to copy to. It overwrites the previous snapshot.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], held: Collection[str], buffers: HostBuffers
    ) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._copies: list[_Copy] = []
        self._event: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        self._problem: str | None = None
        self._copied = threading.Event()
        self._released = threading.Event()
        try:
            with torch.no_grad():
                self._start_copies(tensors, held, buffers)
        except (MemoryError, OSError, RuntimeError) as error:
            # Raised by `complete`, where all ranks fail together.
            self._problem = _copy_failed(error)
        if not self._copies:
            self._released.set()
        if all(copy.is_asynchronous for copy in self._copies):
            self._copied.set()

    def release(self, timeout: float | None = None) -> None:
        """Return when held tensors may change. On CUDA the current stream waits, not the host.

        Args:
            timeout: How long the host waits for copies that it makes itself, in seconds; afterwards
                the snapshot fails. None waits until they end.
        """
        if self._released.is_set():
            return
        if not self._copied.wait(timeout):
            self._problem = "training ended before the state was copied to host memory"
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        changed = [copy.name for copy in self._copies if copy.source._version != copy.version]
        if changed:
            self._problem = (
                f"{changed[0]} was changed before the optimizer's update; for such a model set "
                "checkpoint.asynchronous to false, or call engine.save with wait=True"
            )
        self._released.set()

    def complete(self) -> dict[str, Tensor]:
        """Finish copying and return the tensors to write, in host memory, by name.

        They are valid until the next snapshot in the same buffers.

        Raises:
            CheckpointError: If a tensor changed while it was copied, or a copy failed, for example
                for lack of host memory.
        """
        try:
            with torch.no_grad(), _on_side_stream(self._device):
                for copy in self._copies:
                    if not copy.is_asynchronous:
                        copy.start()
        except (MemoryError, RuntimeError) as error:
            self._problem = _copy_failed(error)
        finally:
            self._copied.set()
        if self._event is not None:
            self._event.synchronize()
        if not self._released.wait(SETTLED_SECONDS):
            self.release()  # no update follows soon: validation, or an error on another rank
        self._copies.clear()
        if self._problem is not None:
            raise CheckpointError(self._problem)
        return self._tensors

    def cancel(self) -> None:
        """Let `release` return although copies may be missing; do not write the snapshot then."""
        self._copied.set()

    def _start_copies(
        self, tensors: Mapping[str, Tensor], held: Collection[str], buffers: HostBuffers
    ) -> None:
        """Copy the tensors that may change now, and enqueue the copies of the held ones."""
        for name, tensor in tensors.items():
            self._tensors[name], copies = _in_host_memory(name, tensor, buffers)
            for copy in copies:
                if copy.source.is_cuda:
                    self._device = copy.source.device
                if name in held:
                    self._copies.append(copy)
                else:
                    copy.start()
        if self._device is not None:
            self._event = _copy_on_device(self._copies, self._device)


def written_here(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the tensors of a state that this rank writes, by name.

    A replicated tensor is assigned to the replica with the fewest bytes so far. All ranks compute
    the same assignment without communication, since all have the same names.

    Args:
        tensors: All tensors of the state by name: `FlatShard`s, DTensors, and plain tensors, which
            are replicated on all ranks.
        rank: This rank.
        world_size: Number of ranks.
    """
    # Number of replicas -> bytes that each of them writes.
    loads: dict[int, list[int]] = {}
    written: dict[str, Tensor] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, FlatShard):
            if tensor.numel() or (rank == 0 and 0 in tensor.global_shape):
                written[name] = tensor
            continue
        replica, replicas = (
            _replica(tensor) if is_traceable_wrapper_subclass(tensor) else (rank, world_size)
        )
        load = loads.setdefault(replicas, [0] * replicas)
        writer = load.index(min(load))
        # One byte more, so that empty tensors are spread, too.
        load[writer] += tensor.numel() * tensor.element_size() + 1
        if replica == writer:
            written[name] = tensor
    return written


def _replica(tensor: Any) -> tuple[int, int]:
    """Return the index of this rank's replica of its shard of a DTensor, and their number."""
    coordinate = tensor.device_mesh.get_coordinate()
    replica, replicas = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dimension)
            replica = replica * size + (0 if coordinate is None else coordinate[dimension])
            replicas *= size
    return (-1 if coordinate is None else replica), replicas


def _in_host_memory(name: str, tensor: Tensor, buffers: HostBuffers) -> tuple[Tensor, list[_Copy]]:
    """Return the host tensor to write in place of `tensor`, and the copies that fill it."""
    items, sources = _parts(name, tensor)
    copies = [
        _Copy(name, source, buffers.like(name, part, source), source._version)
        for part, source in enumerate(sources)
    ]
    targets = [copy.buffer.tensor for copy in copies]
    return targets[0] if items is None else HostParts.of(items, targets), copies


def _parts(name: str, tensor: Tensor) -> tuple[list[Any] | None, list[Tensor]]:
    """Return DCP's write items of a tensor and the values of each; None and a plain tensor."""
    create_write_items = getattr(tensor, "__create_write_items__", None)
    if create_write_items is None:
        return None, [tensor.detach()]
    items = create_write_items(name, tensor)
    return items, [tensor.__get_tensor_shard__(item.index) for item in items]  # type: ignore[attr-defined]


def _copy_failed(error: Exception) -> str:
    return f"the state could not be copied to host memory ({describe(error)})"


def _copy_on_device(copies: list[_Copy], device: torch.device) -> torch.cuda.Event:
    """Enqueue copies on the side stream after the current stream; return an event recorded after.

    See Note [Copying while training continues].
    """
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for copy in copies:
            if copy.is_asynchronous:
                copy.start()
        return stream.record_event()


def _on_side_stream(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else torch.cuda.stream(_side_stream(device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies to the host, one per device."""
    return torch.cuda.Stream(device)
