"""Exact measurements of memory: settings of the allocator, live tensors, resident memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# The allocator returns every large freed tensor to the kernel, and all threads share one arena, so
# that resident memory is memory in use. This is slower, and not for measurements of time.
EXACT_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of live tensors that were created inside of the context.

    It does not see memory that a kernel allocates and frees within one operation.

    Attributes:
        peak: Peak number of bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._at_most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapped tensors are dispatched separately
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not is_traceable_wrapper_subclass(leaf):
                self._count(leaf.untyped_storage())
        if self._at_most > self.peak:
            self.peak = max(self.peak, self._bytes())
        return result

    def _bytes(self) -> int:
        # FSDP frees storages that it keeps, so their initial sizes are only an upper bound.
        alive = [reference() for reference in self._live.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._live:
            self._live[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = storage.nbytes()
            self._at_most += self._sizes[key]

    def _forget(self, key: int) -> None:
        del self._live[key]
        self._at_most -= self._sizes.pop(key)


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process without file-backed pages; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    field = status.partition("RssAnon:")[2].split()
    return 1024 * int(field[0]) if field else 0
