"""Activation checkpointing of blocks that may have buffers."""

# Note [Buffers and recomputation]
#
# A forward may write buffers, such as the running statistics of BatchNorm. The recomputation in
# backward must not write them a second time, and must not read values that were written since the
# first forward. So it runs on copies of the buffers with the values of the first forward. The
# copies are different tensors, because autograd keeps references to tensors that it needs for
# backward.
#
# Between forward and backward, only buffers that forward has written are held twice. A write is
# detected by the version counter of a tensor. Batch norm does not increment the version of its
# statistics; this is correct, because in training mode it writes them without reading them.

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# The module that a buffer is registered in, and its name there.
_Buffer = tuple[nn.Module, str]


def has_buffers(block: nn.Module) -> bool:
    """Return whether a block has buffers, which its forward may write."""
    return any(True for _ in block.buffers())


def checkpoint_activations(block: nn.Module, backend: str | None = None) -> None:
    """Keep only the inputs of a block for backward, which recomputes its activations.

    It replaces `forward` of this object, so that parameter names do not change and FSDP's hooks,
    which gather parameters, run outside of the checkpointed function.

    Args:
        block: The module, changed in place.
        backend: Backend of `torch.compile` if the block or the full model will be compiled. The
            `forward` of a block with buffers is compiled here.
    """
    forward = block.forward
    options: dict[str, Any] = {}
    if has_buffers(block):
        options["context_fn"] = functools.partial(_contexts, block)
        if backend is not None:
            # Compile `forward` itself. Compiling the block would leave the recomputation eager.
            forward = torch.compile(forward, backend=backend)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    # torch.compile supports checkpointing, but not the contexts for buffers.
    block.forward = torch.compiler.disable(recomputed) if has_buffers(block) else recomputed


def _registered(block: nn.Module) -> dict[_Buffer, Tensor]:
    return {
        (holder, name): buffer
        for holder in block.modules()
        for name, buffer in holder.named_buffers(recurse=False, remove_duplicate=False)
    }


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], _Recomputation]:
    """Return contexts of forward and recomputation, see Note [Buffers and recomputation]."""
    values: dict[_Buffer, Tensor] = {}
    return _kept_initial_values(block, values), _Recomputation(block, values)


@contextmanager
def _kept_initial_values(block: nn.Module, values: dict[_Buffer, Tensor]) -> Iterator[None]:
    """Add a copy of the initial value of each buffer that a forward writes to `values`."""
    before = _registered(block)
    versions = {key: buffer._version for key, buffer in before.items()}
    values.update((key, _copy(buffer)) for key, buffer in before.items())
    try:
        yield
    finally:
        after = _registered(block)
        for key, buffer in before.items():
            if after.get(key) is buffer and buffer._version == versions[key]:
                del values[key]


class _Recomputation:
    """Replaces the buffers of a block by copies; may be entered several times."""

    def __init__(self, block: nn.Module, values: dict[_Buffer, Tensor]) -> None:
        self._block = block
        self._values = values

    def __enter__(self) -> None:
        self._buffers = _registered(self._block)
        copies: dict[int, Tensor] = {}
        for key, buffer in self._buffers.items():
            if id(buffer) not in copies:  # one buffer may have several names
                copies[id(buffer)] = _copy(self._values.get(key, buffer))
            setattr(*key, copies[id(buffer)])

    def __exit__(self, *_: object) -> None:
        for key, buffer in self._buffers.items():
            setattr(*key, buffer)
        self._buffers = {}
