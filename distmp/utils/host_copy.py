"""Copies between the device and the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distmp.utils.tensor_trees import map_tensors


def to_device(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """Return a tensor on a device. The host waits for a copy to the host, or of pageable memory.

    Args:
        tensor: On any device, of any shape and dtype.
        device: The device.
        copy: Copy a tensor that is on the device, too.
    """
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; the host waits as in `to_device`.

    Args:
        batch: A tensor, or nested containers of tensors and other objects, see torch's pytrees.
        device: The device.
    """
    return map_tensors(partial(to_device, device=device), batch)


def numbers_to_device(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (nested lists of) numbers as a tensor on a device; the host does not wait."""
    tensor = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":  # a copy from pageable memory makes the host wait
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def cpu_number(tensor: Tensor) -> float:
    """Return the number in a CPU tensor without an operation of torch; 1 for a fake tensor.

    Args:
        tensor: On the CPU, of one element.
    """
    tensor = tensor.detach()
    return 1.0 if isinstance(tensor, FakeTensor) else float(tensor.numpy())


# Note [When a host copy is complete]
# `Tensor.to("cpu", non_blocking=True)` from CUDA returns before the copy has run: until then the
# host tensor holds arbitrary bytes. An event recorded after the copy on the same stream shows when
# the copy is complete. No other stream may write to the source before that; later writes on the
# same stream are ordered after the copy. A CPU tensor is not copied at all, so the caller must not
# write to it afterwards.
class HostCopy:
    """An asynchronous copy of a tensor to the host.

    Args:
        values: The tensor to copy, of any shape and dtype; not written to afterwards.

    Attributes:
        on_device: Whether the values were on a CUDA device.
    """

    def __init__(self, values: Tensor) -> None:
        self.on_device = values.is_cuda
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(values.device))

    @property
    def is_complete(self) -> bool:
        """Whether `read` returns without waiting for the device."""
        return self._copied is None or self._copied.query()

    def read(self) -> Any:
        """Wait for the copy and return its values, as `Tensor.tolist` does."""
        return self.tensor().tolist()

    def tensor(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
