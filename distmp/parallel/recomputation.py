"""Activation checkpointing of a block: what forward computed is computed again for backward.

[Note: buffers]
A forward may write buffers, such as the statistics of BatchNorm. Running it a second time must
neither write them again nor read what has been written since. So a recomputation runs on copies of
the buffers, with the values that the first forward found. They are other tensors, not the same ones
set back, because autograd keeps references to what it reads.

From forward to backward only what forward has written is held twice. torch counts the writes to a
tensor, except those of a batch norm to its statistics, which it does not read where it writes them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def has_buffers(block: nn.Module) -> bool:
    """Return whether forward may write something that outlives it."""
    return any(True for _ in block.buffers())


def checkpoint_activations(block: nn.Module, backend: str | None = None) -> None:
    """Keep only the inputs of a block for backward, which computes the rest again.

    Replaces `forward` of this one object, so that names and hooks stay as they are, and FSDP's
    hooks, which gather parameters, stay outside.

    Args:
        block: The module.
        backend: Of `torch.compile`, if the block or the whole model is to be compiled; with buffers
            `forward` is compiled here.
    """
    forward = block.forward
    options: dict[str, Any] = {}
    if has_buffers(block):
        options["context_fn"] = functools.partial(_contexts, block)
        if backend is not None:
            # Compiled by itself: compiled from the outside it would be so in forward only.
            forward = torch.compile(forward, backend=backend)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    # torch.compile computes a block without buffers again by itself, and knows no contexts.
    block.forward = torch.compiler.disable(recomputed) if options else recomputed


class _BufferPlace(NamedTuple):
    """Where a buffer is registered."""

    holder: nn.Module
    name: str


def _registered(block: nn.Module) -> dict[_BufferPlace, Tensor]:
    return {
        _BufferPlace(holder, name): buffer
        for holder in block.modules()
        for name, buffer in holder.named_buffers(recurse=False, remove_duplicate=False)
    }


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _contexts(block: nn.Module) -> tuple[_Forward, _Recomputation]:
    """Return the contexts of a forward and of its recomputation, see [Note: buffers]."""
    forward = _Forward(block)
    return forward, _Recomputation(block, forward.found)


class _Forward:
    """Keeps the values that a forward finds in the buffers which it writes.

    Attributes:
        found: A copy of each of them.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.found: dict[_BufferPlace, Tensor] = {}

    def __enter__(self) -> None:
        self._before = _registered(self._block)
        self._versions = {place: buffer._version for place, buffer in self._before.items()}
        self.found.update((place, _copy(buffer)) for place, buffer in self._before.items())

    def __exit__(self, *_: object) -> None:
        after = _registered(self._block)
        for place, buffer in self._before.items():
            if after.get(place) is buffer and buffer._version == self._versions[place]:
                del self.found[place]
        self._before = {}


class _Recomputation:
    """Has a block run on copies of its buffers; may be entered several times."""

    def __init__(self, block: nn.Module, found: dict[_BufferPlace, Tensor]) -> None:
        self._block = block
        self._found = found

    def __enter__(self) -> None:
        self._buffers = _registered(self._block)
        copies: dict[int, Tensor] = {}
        for place, buffer in self._buffers.items():
            if id(buffer) not in copies:  # one buffer may have several names
                copies[id(buffer)] = _copy(self._found.get(place, buffer))
            setattr(*place, copies[id(buffer)])

    def __exit__(self, *_: object) -> None:
        for place, buffer in self._buffers.items():
            setattr(*place, buffer)
        self._buffers = {}
