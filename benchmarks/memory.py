"""Two measures of the memory that training takes: pages of the process, and live tensors."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# The allocator returns every large tensor to the kernel when it is freed, and all threads share one
# arena: what is resident is what is in use. It is slower so, and not for measurements of time.
EXACT_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


def settle() -> int:
    """Free what nobody uses, forget the peak before; return the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Return the most resident bytes since `settle`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of tensors that operations inside the context have made and that still live.

    Memory that a kernel takes and gives back inside one operation is not seen.

    Attributes:
        peak: The most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, torch.Tensor) and _wraps(kind) for kind in types):
            return NotImplemented  # what it wraps comes by on its own
        result = func(*args, **(kwargs or {}))
        grown = [
            self._count(leaf.untyped_storage())
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and not is_traceable_wrapper_subclass(leaf)
        ]
        if any(grown):
            self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        """Return how many bytes there are now."""
        alive = [reference() for reference in list(self._live.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def _count(self, storage: torch.UntypedStorage) -> bool:
        key = id(storage)
        if key in self._live:
            return False
        self._live[key] = weakref.ref(storage, lambda _: self._live.pop(key, None))
        return True


def _wraps(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")
