"""Measure the tensors that are alive at the memory peak of a step, by purpose."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# In the order of the table: persistent parts first, then temporary ones.
PARTS = (
    PARAMETERS := "parameters",
    BUFFERS := "module buffers",
    MASTERS := "master weights",
    OPTIMIZER_STATE := "optimizer state",
    AVERAGE := "average of the weights",
    GRADIENTS := "FP32 gradients",
    PARTIAL_SUMS := "partial sums of microbatches",
    GATHERED := "gathered parameters",
    ACTIVATIONS := "activations, logits and loss",
    BACKWARD := "temporary in backward and reduction",
    OPTIMIZER := "temporary in the optimizer's step",
    COMMUNICATION := "sent and received",
    BATCHES := "batches",
    REST := "everything else",
)
# Parts that are assigned by the phase in which a tensor was allocated, until it gets a label.
PHASES = (ACTIVATIONS, BACKWARD, OPTIMIZER, REST)


class LiveBytes(TorchDispatchMode):
    """Tracks the memory of every tensor that is allocated inside of it.

    It does not see memory that a kernel allocates and frees within one operation, nor the rounding
    of an allocator.

    Attributes:
        phase: The part that is assigned to new tensors.
        live: Current memory, in bytes by part.
        peak: Memory at the peak since `start`, in bytes by part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = REST
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._peak_total = 0
        # Storage pointer: part, size in bytes, and a weak reference whose callback reports its end.
        self._known: dict[int, tuple[str, int, weakref.ref[Any]]] = {}
        self._resize: Any = None

    def __enter__(self) -> LiveBytes:
        """Start tracking, including `resize_`, with which FSDP frees and reallocates storages."""
        original, track = torch.UntypedStorage.resize_, self._track

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            track(storage, GATHERED)
            return result

        self._resize = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self._resize.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop tracking."""
        super().__exit__(*exception)
        self._resize.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            for storage in _storages(pytree.tree_leaves(args)):
                known = self._known.get(storage._cdata)
                if known is not None and known[0] in PHASES:
                    self._track(storage, COMMUNICATION)
        else:
            for storage in _storages(pytree.tree_leaves(result)):
                if storage._cdata not in self._known:
                    self._track(storage, self.phase)
        return result

    def start(self) -> None:
        """Reset the peak."""
        self._peak_total, self.peak = 0, {}
        self._update_peak()

    def label(self, tensors: Iterable[Tensor], part: str) -> None:
        """Assign tensors to a part."""
        for storage in _storages(tensors):
            self._track(storage, part)

    def _track(self, storage: Any, part: str) -> None:
        key = storage._cdata
        self._forget(key)
        size = storage.nbytes()
        self._known[key] = part, size, weakref.ref(storage, lambda _: self._forget(key))
        self.live[part] = self.live.get(part, 0) + size
        self._update_peak()

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self.live[known[0]] -= known[1]

    def _update_peak(self) -> None:
        total = sum(self.live.values())
        # Also update an equal peak: a label may have moved tensors between parts.
        if total >= self._peak_total:
            self._peak_total = total
            self.peak = {part: size for part, size in self.live.items() if size}


def _storages(leaves: Iterable[Any]) -> Iterable[Any]:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            if is_traceable_wrapper_subclass(leaf):
                names, _ = leaf.__tensor_flatten__()
                yield from _storages(getattr(leaf, name) for name in names)
            else:
                yield leaf.untyped_storage()
