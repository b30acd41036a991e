"""The buffers of a module during training: batch statistics and the like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ModuleBuffers:
    """Keeps buffers equal on all ranks, and free of what a skipped step wrote into them.

    After a step every rank has the buffers of rank 0, as torch's DDP has them in the next forward.
    A step that was skipped leaves them as they were before it: running statistics of activations
    that overflowed would be lost for ever.

    Args:
        module: Its buffers, whatever is registered at the time.
        group: The ranks; None for a single process.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._group = group
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin_step(self) -> None:
        """Remember the buffers; what a step that was not ended has written is taken back first."""
        restore_buffers(self._module, self._before)
        self._before = buffer_values(self._module)

    @torch.no_grad()
    def end_step(self, skipped: Tensor) -> None:
        """Take back what a skipped step wrote, and take over rank 0's buffers.

        Args:
            skipped: 0-dim, not 0 if the step was skipped; the host does not wait for it.
        """
        take_back(self._module, self._before, skipped.bool())
        self._before = {}
        if self._group is not None:
            _broadcast(self._module.buffers(), self._group)


@torch.no_grad()
def buffer_values(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's buffers by name."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@torch.no_grad()
def restore_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Write `values` back into the buffers of these names, as far as they are still there."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(values[name])


@contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Undo what forward writes into buffers, such as running statistics."""
    values = buffer_values(module)
    try:
        yield
    finally:
        restore_buffers(module, values)


@torch.no_grad()
def take_back(module: nn.Module, values: dict[str, Tensor], undo: Tensor) -> None:
    """Write `values` back where `undo`, 0-dim bool, is true; the host does not wait for it."""
    # All of them: torch writes running statistics without counting up a tensor's version.
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(torch.where(undo, values[name], buffer))


def _broadcast(all_buffers: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for buffer in all_buffers:
        by_kind.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    source = dist.get_global_rank(group, 0)
    for buffers in by_kind.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, source, group)
        parts = flat.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))
