"""Module buffers during training, such as batch statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Buffers are copied in batches: a kernel for each of hundreds of small buffers takes longer to
# launch than to run. While a batch is reverted or sent, it needs up to three times its memory.
BATCH_BYTES = 64 << 20


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
            _broadcast(self._module, self._group)


@torch.no_grad()
def buffer_values(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's buffers by name, except of empty ones."""
    values: dict[str, Tensor] = {}
    for batch in _batches(module.named_buffers()):
        buffers = [*batch.values()]
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        values.update(zip(batch, _parts(flat, buffers), strict=True))
    return values


@torch.no_grad()
def restore_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Write `values` back to the buffers with these names, except buffers that were removed."""
    for batch in _batches(_buffers_with(values, module)):
        _copy([*batch.values()], [values[name] for name in batch])


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
    for batch in _batches(_buffers_with(values, module)):
        buffers = [*batch.values()]
        before = [_fitted(values[name], buffer) for name, buffer in batch.items()]
        flat = torch.where(revert, _flat(before), _flat(buffers))
        _copy(buffers, _parts(flat, buffers))


def _broadcast(module: nn.Module, group: dist.ProcessGroup) -> None:
    source = dist.get_global_rank(group, 0)
    for batch in _batches(module.named_buffers()):
        buffers = [*batch.values()]
        flat = _flat(buffers)
        dist.broadcast(flat, source, group)
        _copy(buffers, _parts(flat, buffers))


def _buffers_with(values: dict[str, Tensor], module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that have a value: others were registered or filled later."""
    return (named for named in module.named_buffers() if named[0] in values)


def _batches(buffers: Iterable[tuple[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Group buffers that are not empty by device and dtype, up to `BATCH_BYTES` or one buffer."""
    batches: list[dict[str, Tensor]] = []
    # The last batch of a device and dtype, and its bytes.
    last: dict[tuple[torch.device, torch.dtype], tuple[dict[str, Tensor], int]] = {}
    for name, buffer in buffers:
        if buffer.numel() == 0:
            continue
        kind = (buffer.device, buffer.dtype)
        batch, filled = last.get(kind, ({}, 0))
        if filled + buffer.nbytes > BATCH_BYTES:
            batch, filled = {}, 0
        if not batch:
            batches.append(batch)
        batch[name] = buffer
        last[kind] = (batch, filled + buffer.nbytes)
    return batches


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one dtype; those of one contiguous tensor as a view."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` with the shapes of the tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, those of contiguous targets together."""
    # CUDA copies a list one by one if the strides of a single pair differ.
    for contiguous in (True, False):
        chosen = [n for n, target in enumerate(targets) if target.is_contiguous() is contiguous]
        if chosen:
            torch._foreach_copy_([targets[n] for n in chosen], [sources[n] for n in chosen])


def _fitted(value: Tensor, buffer: Tensor) -> Tensor:
    """Return `value` with shape and dtype of a buffer that was replaced."""
    if value.shape == buffer.shape and value.dtype == buffer.dtype:
        return value
    return value.expand_as(buffer).to(buffer.dtype)
