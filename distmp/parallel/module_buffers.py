"""Module buffers during training, such as batch statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ModuleBuffers:
    """Keeps buffers equal on all ranks, and reverts what a skipped step wrote to them.

    After a step every rank has the buffers of rank 0, which torch's DDP broadcasts in the next
    forward. A skipped step leaves them unchanged: running statistics never recover from activations
    that are not finite.

    Args:
        module: The module; buffers that are registered later are included.
        group: The ranks; None for a single process.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._group = group
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin_step(self) -> None:
        """Copy the buffers; first revert what an unfinished step has written."""
        if self._before:
            restore_buffers(self._module, self._before)
        self._before = buffer_values(self._module)

    @torch.no_grad()
    def end_step(self, skipped: Tensor) -> None:
        """Revert what a skipped step wrote, and broadcast the buffers of rank 0.

        Args:
            skipped: 0-dim, nonzero if the step was skipped; the host does not wait for it.
        """
        revert_buffers(self._module, self._before, skipped.bool())
        self._before = {}
        if self._group is not None:
            _broadcast(self._module.buffers(), self._group)


@torch.no_grad()
def buffer_values(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's buffers by name."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@torch.no_grad()
def restore_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Write `values` back to the buffers with these names, except buffers that were removed."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(values[name])


@contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Restore the buffers at the end, undoing what forward writes, such as running statistics."""
    values = buffer_values(module)
    try:
        yield
    finally:
        restore_buffers(module, values)


@torch.no_grad()
def revert_buffers(module: nn.Module, values: dict[str, Tensor], revert: Tensor) -> None:
    """Write `values` back if `revert`, 0-dim bool, is True; the host does not wait for it."""
    # All buffers: torch writes running statistics without incrementing a tensor's version.
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(torch.where(revert, values[name], buffer))


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
