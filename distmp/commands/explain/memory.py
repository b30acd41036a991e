"""Which tensors are alive at the moment when a step needs most memory, by what they are for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

PARAMETERS = "parameters"
BUFFERS = "module buffers"
MASTERS = "master weights"
OPTIMIZER_STATE = "optimizer state"
GRADIENTS = "FP32 gradients"
PARTIAL_SUMS = "partial sums of microbatches"
GATHERED = "gathered parameters"
ACTIVATIONS = "activations, logits and loss"
BACKWARD = "temporary in backward and reduction"
OPTIMIZER = "temporary in the optimizer's step"
WIRE = "sent and received"
BATCHES = "batches"
REST = "everything else"

# In the order of a table: what stays from step to step, then what comes and goes.
PARTS = (
    PARAMETERS,
    BUFFERS,
    MASTERS,
    OPTIMIZER_STATE,
    GRADIENTS,
    PARTIAL_SUMS,
    GATHERED,
    ACTIVATIONS,
    BACKWARD,
    OPTIMIZER,
    WIRE,
    BATCHES,
    REST,
)
# What is named after the phase in which it was made, until somebody knows better.
PHASES = (ACTIVATIONS, BACKWARD, OPTIMIZER, REST)


class LiveBytes(TorchDispatchMode):
    """Follows the memory of every tensor that is made inside of it.

    What a kernel takes and gives back within one operation is not seen, nor what an allocator
    rounds up.

    Attributes:
        phase: The part that new tensors belong to.
        live: Bytes by part, now.
        peak: Bytes by part at the moment since `start` when they were most in all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = REST
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._most = 0
        # By the address of a storage: what it is for, its bytes, and the reference that tells when
        # it is gone.
        self._known: dict[int, tuple[str, int, weakref.ref[Any]]] = {}
        self._resize: Any = None

    def __enter__(self) -> LiveBytes:
        """Start to follow; FSDP empties and refills memory behind the back of operations."""
        own, follow = torch.UntypedStorage.resize_, self._follow

        def resize(storage: Any, size: int) -> Any:
            result = own(storage, size)
            follow(storage, GATHERED)
            return result

        self._resize = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self._resize.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop to follow."""
        super().__exit__(*exception)
        self._resize.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            for storage in _storages(pytree.tree_leaves(args)):
                known = self._known.get(storage._cdata)
                if known is not None and known[0] in PHASES:
                    self._follow(storage, WIRE)
        else:
            for storage in _storages(pytree.tree_leaves(result)):
                if storage._cdata not in self._known:
                    self._follow(storage, self.phase)
        return result

    def start(self) -> None:
        """Begin to look for the peak."""
        self._most, self.peak = 0, {}
        self._note()

    def label(self, tensors: Iterable[Tensor], part: str) -> None:
        """Say what tensors are for."""
        for storage in _storages(tensors):
            self._follow(storage, part)

    def _follow(self, storage: Any, part: str) -> None:
        key = storage._cdata
        self._forget(key)
        size = storage.nbytes()
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._known[key] = part, size, reference
        self.live[part] = self.live.get(part, 0) + size
        self._note()

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self.live[known[0]] -= known[1]

    def _note(self) -> None:
        total = sum(self.live.values())
        # Equal too: what has just been labelled is known better now.
        if total >= self._most:
            self._most, self.peak = total, {part: size for part, size in self.live.items() if size}


def _storages(leaves: Iterable[Any]) -> Iterable[Any]:
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if is_traceable_wrapper_subclass(leaf):
                names, _ = leaf.__tensor_flatten__()
                yield from _storages(getattr(leaf, name) for name in names)
            else:
                yield leaf.untyped_storage()
