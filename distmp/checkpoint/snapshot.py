"""A copy of a run's state in host memory, from which it is written while training goes on.

Weights and optimizer state, nearly everything, stand still between two updates of the optimizer. So
they are copied while the next step runs forward and backward, and only its update waits for the
copy, if it has not ended by then: on CUDA the device copies, in a stream of its own, and the device
waits; for tensors in host memory a thread does, and the training thread waits. What is left
(buffers of the model, counts) is small and copied at once.

A rank copies only what it is going to write: its own shards, and its share of what all ranks have.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.errors import CheckpointError
from distmp.utils.flat_shard import FlatShard

# From this size on memory is pinned where it lies. For small tensors that is not worth a call of
# the driver, but torch's own pinned memory comes in powers of two.
PINNED_IN_PLACE_BYTES = 1 << 20


class HostParts(Tensor):
    """Parts of a tensor in host memory, which torch.distributed.checkpoint (DCP) writes.

    The tensor itself is empty. DCP asks a DTensor or a `FlatShard` what to write; here the answers
    have been noted.

    Attributes:
        items: DCP's write items.
        parts: The values of each, contiguous, each with a memory of its own: DCP copies a tensor
            that is a part of a larger memory, and keeps all copies until a file is written.
    """

    items: list[Any]
    parts: list[Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(items: list[Any], parts: list[Tensor]) -> HostParts:
        """Return the parts, one for each item."""
        found = torch.Tensor._make_subclass(HostParts, torch.empty(0, dtype=parts[0].dtype))
        found.items, found.parts = items, parts
        return found

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        return self.items

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for item, part in zip(self.items, self.parts, strict=True):
            if item.index.offset == index.offset:
                return part
        raise ValueError(f"no part of {index.fqn!r} begins at {index.offset}")


class HostBuffers:
    """Host memory for snapshots, used again for every one; pinned if it receives from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def like(self, name: str, part: int, source: Tensor) -> Tensor:
        """Return the memory for a part of the tensor `name`: shape and dtype of `source`."""
        key = (name, part)
        found = self._buffers.get(key)
        if found is None or found.shape != source.shape or found.dtype != source.dtype:
            found = _host_memory(source)
            self._buffers[key] = found
        return found

    def bytes(self) -> int:
        """Return how much memory there is, in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class _Copy(NamedTuple):
    """A copy that may still be under way.

    Attributes:
        name: Of the tensor.
        source: The live values.
        target: Host memory.
        version: Of the source when the copy was ordered.
    """

    name: str
    source: Tensor
    target: Tensor
    version: int


class Snapshot:
    """The state at one moment, complete a little later.

    Training calls `release` before anything that is `held` changes, and another thread `complete`
    to have the copy.

    Args:
        tensors: Live tensors by name, those that this rank writes.
        held: Names of those that do not change before `release` is called.
        buffers: Where to copy to; what an earlier snapshot had there is overwritten.
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
                self._order(tensors, held, buffers)
        except (MemoryError, OSError, RuntimeError) as error:
            # Told by `complete`: the other ranks have to learn of it.
            self._problem = f"no host memory for a copy of the state ({error})"
        if not self._copies:
            self._released.set()

    def release(self) -> None:
        """Return as soon as held tensors may change. On CUDA that is an order for the device."""
        if self._released.is_set():
            return
        self._copied.wait()
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        moved = [copy.name for copy in self._copies if copy.source._version != copy.version]
        if moved:
            self._problem = (
                f"{moved[0]} was changed before the optimizer's update; for such a model set "
                "checkpoint.asynchronous to false"
            )
        self._released.set()

    def complete(self) -> dict[str, Tensor]:
        """Do the rest of the copying and return the tensors to be written.

        They are good until the next snapshot in the same buffers.

        Raises:
            CheckpointError: If they are not those of one moment, or there is no memory for them.
        """
        try:
            with torch.no_grad():
                for copy in self._copies:
                    if not copy.source.is_cuda:
                        copy.target.copy_(copy.source)
        except (MemoryError, RuntimeError) as error:
            self._problem = f"the state could not be copied ({error})"
        finally:
            self._copied.set()
        if self._event is not None:
            self._event.synchronize()
        self._released.wait()
        self._copies.clear()
        if self._problem is not None:
            raise CheckpointError(self._problem)
        return self._tensors

    def _order(
        self, tensors: Mapping[str, Tensor], held: Collection[str], buffers: HostBuffers
    ) -> None:
        """Copy what may change, and order the copies of what is held."""
        for name, tensor in tensors.items():
            self._tensors[name], copies = _in_host_memory(name, tensor, buffers)
            for copy in copies:
                if copy.source.is_cuda:
                    self._device = copy.source.device
                if name in held:
                    self._copies.append(copy)
                else:
                    copy.target.copy_(copy.source, non_blocking=True)
        if self._device is not None:
            self._event = _copy_on_device(self._copies, self._device)


def written_here(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the tensors of a state that this rank writes.

    Those that several ranks have go to the one of them with the least to write so far. Every rank
    finds the same without asking the others, as all have the same names.

    Args:
        tensors: All tensors of the state: `FlatShard`s, DTensors, and plain ones, which all ranks
            have.
        rank: This rank.
        world_size: Number of ranks.
    """
    # Bytes that each of so many replicas has to write.
    loads: dict[int, list[int]] = {}
    found: dict[str, Tensor] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, FlatShard):
            if tensor.numel():
                found[name] = tensor
            continue
        replica, replicas = (
            _replica(tensor) if is_traceable_wrapper_subclass(tensor) else (rank, world_size)
        )
        load = loads.setdefault(replicas, [0] * replicas)
        writer = load.index(min(load))
        # An empty one counts too, so that numbers are spread.
        load[writer] += tensor.numel() * tensor.element_size() + 1
        if replica == writer:
            found[name] = tensor
    return found


def _replica(tensor: Any) -> tuple[int, int]:
    """Return which copy of its shard of a DTensor this rank has, and how many there are."""
    coordinate = tensor.device_mesh.get_coordinate()
    replica, replicas = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dimension)
            replica = replica * size + (0 if coordinate is None else coordinate[dimension])
            replicas *= size
    return (-1 if coordinate is None else replica), replicas


def _in_host_memory(name: str, tensor: Tensor, buffers: HostBuffers) -> tuple[Tensor, list[_Copy]]:
    """Return what is written in place of `tensor`, and the copies that it needs."""
    ask = getattr(tensor, "__create_write_items__", None)
    if ask is None:
        copy = _copy(name, 0, tensor.detach(), buffers)
        return copy.target, [copy]
    items = ask(name, tensor)
    copies = [
        _copy(name, part, tensor.__get_tensor_shard__(item.index), buffers)  # type: ignore[attr-defined]
        for part, item in enumerate(items)
    ]
    return HostParts.of(items, [copy.target for copy in copies]), copies


def _copy(name: str, part: int, source: Tensor, buffers: HostBuffers) -> _Copy:
    return _Copy(name, source, buffers.like(name, part, source), source._version)


def _copy_on_device(copies: list[_Copy], device: torch.device) -> torch.cuda.Event:
    """Have the device copy, after what it has been ordered to do so far; return the end of it."""
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for copy in copies:
            if copy.source.is_cuda:
                copy.target.copy_(copy.source, non_blocking=True)
        return stream.record_event()


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies to the host, always the same one."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


def _host_memory(source: Tensor) -> Tensor:
    if not source.is_cuda:
        return torch.empty(source.shape, dtype=source.dtype)
    if source.nbytes < PINNED_IN_PLACE_BYTES:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return _pin(_whole_pages(source))


def _whole_pages(source: Tensor) -> Tensor:
    """Return memory that shares no page with anything else: pages are what is pinned."""
    flat = torch.frombuffer(mmap.mmap(-1, source.nbytes), dtype=source.dtype)
    return flat.view(source.shape)


def _pin(tensor: Tensor) -> Tensor:
    """Pin the memory of a tensor for as long as it lives."""
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 1)))
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
    return tensor
