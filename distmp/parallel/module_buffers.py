"""Modules and their buffers during training, such as batch statistics."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from distmp.distributed.comparison import check_same, describe_model
from distmp.utils.dtypes import as_sent
from distmp.utils.tensor_trees import tensors_in

# Buffers are copied in batches: a kernel for each of hundreds of small buffers takes longer to
# launch than to run. While a batch is reverted or sent, it needs up to three times its memory.
BATCH_BYTES = 64 << 20


# The buffers of all engines in this process. The loss of a generator also runs the discriminator,
# which another engine trains, and writes to its buffers.
_of_all_engines: weakref.WeakSet[ModuleBuffers] = weakref.WeakSet()


class ModuleTree:
    """The modules of a model at a time, with their parameters and buffers.

    A walk with `named_parameters` makes a name of each parameter, which takes milliseconds for
    hundreds of modules. This compares identities, without a loop in Python.

    Args:
        model: The model.

    Attributes:
        buffers: The buffers of each module by name, as the module itself has them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots: list[dict[str, object]] = [
            slots  # type: ignore[misc]
            for module in model.modules()
            for slots in (module._modules, module._parameters, module._buffers)
        ]
        self.buffers: list[Any] = self._slots[2::3]
        self._lengths = list(map(len, self._slots))
        # Most are empty. Those that get an entry have another length then.
        self._filled = [slots for slots in self._slots if slots]
        self._values = list(self._current())

    def _current(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self._filled))

    def is_unchanged(self) -> bool:
        """Return whether each module has the same submodules, parameters and buffers."""
        return list(map(len, self._slots)) == self._lengths and all(
            map(operator.is_, self._current(), self._values)
        )


class BufferBatches:
    """The buffers of a module, in batches that are made again only if its buffers change.

    Args:
        module: The module; buffers that are registered later are included.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tree, self._batches = ModuleTree(module), _grouped(module)

    def current(self) -> list[dict[str, Tensor]]:
        """Return the buffers that are not empty, see `_grouped`."""
        if not self._tree.is_unchanged():
            self._tree, self._batches = ModuleTree(self._module), _grouped(self._module)
        return self._batches

    def copy_parts_of(self, inputs: Any) -> None:
        """Register copies of buffers in the memory of inputs, which is not ours to write to."""
        of_inputs = {*map(_memory, tensors_in(inputs))}
        copies: dict[int, Tensor] = {}
        for buffers in filter(None, self._tree.buffers):
            for name, buffer in buffers.items():
                if buffer is not None and _memory(buffer) in of_inputs:
                    buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


class ModuleBuffers:
    """Keeps buffers equal on all ranks, and reverts what a skipped step wrote to them.

    After a step every rank has the buffers of rank 0; torch's DDP broadcasts them in the next
    forward. A skipped step leaves them unchanged: running statistics never recover from activations
    that are not finite. The same holds for what it wrote to buffers of other engines' modules;
    these are equal on all ranks again after a step of that engine, or `broadcast`.

    With `reproducible`, each microbatch begins with the buffers of the beginning of the step, and
    the step leaves those that the first microbatch of the global batch has written, as if each
    microbatch ran on a separate rank. The buffers of other engines' modules stay unchanged.

    Args:
        module: The module; buffers that are registered later are included.
        group: The ranks; None for a single process.
        reproducible: Whether buffers must not depend on the number of ranks.

    Attributes:
        batches: The buffers.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None, *, reproducible: bool = False
    ) -> None:
        self._module = module
        self.batches = BufferBatches(module)
        self._group = group
        # What every rank broadcasts after a step, unless all ranks have changed their buffers.
        self._common = _sizes(self.batches.current())
        self._reproducible = reproducible
        # The values at the beginning of the step: of this module, then of those of other engines.
        self._before: list[BufferValues] = []
        # What the first of several microbatches wrote, with `reproducible`.
        self._of_first: list[BufferValues] = []

    def enlist(self) -> None:
        """Let steps of other engines revert what they write to these buffers, too."""
        _of_all_engines.add(self)

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the buffers that are not empty, which are equal on all ranks."""
        return [
            tuple(buffer.shape) for batch in self.batches.current() for buffer in batch.values()
        ]

    def begin_step(self) -> None:
        """Copy the buffers."""
        self._before = values_of_all_engines(self.batches)
        self._of_first = []

    def end_failed_step(self) -> None:
        """Revert what an unfinished step has written, before anything else is written."""
        _restore(self._before)
        self._before = []

    def begin_microbatch(self, index: int) -> None:
        """Undo what earlier microbatches of the step wrote; needed with `reproducible`.

        Args:
            index: Index of the microbatch on this rank.
        """
        if index == 1:
            self._of_first = [BufferValues(self.batches)]
        if index > 0:
            _restore(self._before)

    def end_step(self, skipped: Tensor, differ: Tensor | None = None) -> None:
        """Revert what a skipped step wrote, and broadcast the buffers of rank 0.

        Args:
            skipped: 0-dim, nonzero if the step was skipped; the host does not wait for it.
            differ: 0-dim, whether ranks took different steps, for example with buffers of other
                shapes; None for a single rank. The host waits for it only if the sizes of the
                buffers have changed.
        """
        if self._reproducible:
            _restore([*self._of_first, *self._before[1:]])
        for values in self._before:
            values.revert(skipped)
        self._before = []
        if self._group is None:
            return
        if _sizes(self.batches.current()) != self._common and differ is not None and differ:
            # Ranks whose buffers have not changed do not know of it, and broadcast theirs.
            for size, dtype, device in self._common:
                self._broadcast(torch.empty(size, dtype=dtype, device=device))
        else:
            self._broadcast_all()

    def broadcast(self, device: torch.device) -> None:
        """Set the buffers to those of rank 0; every rank has to call it.

        Args:
            device: The device that this rank communicates from.

        Raises:
            ConfigError: On every rank, if the models of ranks differ.
        """
        if self._group is not None:
            check_same(self._group, device, describe_model(self._module))
            self._broadcast_all()

    @torch.no_grad()
    def _broadcast_all(self) -> None:
        batches = self.batches.current()
        self._common = _sizes(batches)
        for batch in batches:
            flat = _flat(batch)
            self._broadcast(flat)
            _write(batch, _parts(batch, flat))

    def _broadcast(self, flat: Tensor) -> None:
        assert self._group is not None
        dist.broadcast(as_sent(flat), dist.get_global_rank(self._group, 0), self._group)


class BufferValues:
    """Copies of a module's buffers by name, which can be written back.

    Buffers that are registered later are left unchanged, and so are those that have another shape,
    such as a table of positions that grew with the sequence. Another tensor that replaces a buffer
    is overwritten with the former values, in its own dtype.

    Args:
        batches: The buffers.
    """

    @torch.no_grad()
    def __init__(self, batches: BufferBatches) -> None:
        self._batches = batches
        self._values: dict[str, Tensor] = {}
        for batch in batches.current():
            flat = _flat(batch) if len(batch) > 1 else _flat(batch).clone()
            self._values.update(zip(batch, _parts(batch, flat), strict=True))

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back."""
        for batch in self._batches.current():
            _write(batch, self._before(batch))

    @torch.no_grad()
    def revert(self, condition: Tensor) -> None:
        """Write the values back if `condition`, 0-dim, is not 0; the host does not wait."""
        # All buffers: torch writes running statistics without incrementing a tensor's version.
        for batch in self._batches.current():
            now, before = _flat(batch), _flatten_dense_tensors(self._before(batch))
            both = as_sent(before), as_sent(now)  # torch 2.10 selects no uint16
            values = torch.where(condition.to(now.device, torch.bool), *both)
            _write(batch, _parts(batch, values.view(now.dtype)))

    def _before(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Return the former values of buffers, and the values of those with a new shape or name."""
        former = [self._values.get(name, buffer) for name, buffer in batch.items()]
        return [
            value.to(buffer.dtype) if value.shape == buffer.shape else buffer
            for value, buffer in zip(former, batch.values(), strict=True)
        ]


@contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Restore the buffers at the end, undoing what forward writes, such as running statistics.

    This includes the buffers of the modules of all engines, which the forward may run too.
    """
    saved = values_of_all_engines(BufferBatches(module))
    try:
        yield
    finally:
        _restore(saved)


def _restore(saved: list[BufferValues]) -> None:
    for values in saved:
        values.restore()


def values_of_all_engines(own: BufferBatches) -> list[BufferValues]:
    """Return copies of a module's buffers, then of those of the other engines' modules.

    Args:
        own: The buffers of the module.
    """
    others = [each.batches for each in _of_all_engines if each._module is not own._module]
    return [BufferValues(batches) for batches in (own, *others)]


def repeats_elements(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor are one number in memory."""
    return tensor.layout == torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _memory(tensor: Tensor) -> int:
    """Return a number that all views of one tensor have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _grouped(module: nn.Module) -> list[dict[str, Tensor]]:
    """Group buffers by device and dtype, up to `BATCH_BYTES` or one buffer.

    Without those that are empty or cannot be written to, and views of parameters, whose updates
    they show.
    """
    of_parameters = {*map(_memory, module.parameters())}
    batches: list[dict[str, Tensor]] = []
    last: dict[tuple[torch.device, torch.dtype], tuple[dict[str, Tensor], int]] = {}
    for name, buffer in module.named_buffers():
        if buffer.numel() == 0 or repeats_elements(buffer) or _memory(buffer) in of_parameters:
            continue
        kind = (buffer.device, buffer.dtype)
        batch, nbytes = last.get(kind, ({}, 0))
        if not batch or nbytes + buffer.nbytes > BATCH_BYTES:
            batch, nbytes = {}, 0
            batches.append(batch)
        batch[name] = buffer
        last[kind] = batch, nbytes + buffer.nbytes
    return batches


def _sizes(batches: list[dict[str, Tensor]]) -> list[tuple[int, torch.dtype, torch.device]]:
    """Return number of elements, dtype and device of each batch of buffers."""
    firsts = [next(iter(batch.values())) for batch in batches]
    return [
        (sum(map(Tensor.numel, batch.values())), first.dtype, first.device)
        for batch, first in zip(batches, firsts, strict=True)
    ]


def _flat(batch: dict[str, Tensor]) -> Tensor:
    """Return the elements of all buffers, 1-dim; a view if there is only one."""
    return _flatten_dense_tensors([*batch.values()])


def _parts(batch: dict[str, Tensor], flat: Tensor) -> Sequence[Tensor]:
    return _unflatten_dense_tensors(flat, [*batch.values()])


def _write(batch: dict[str, Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to the buffers; contiguous ones in one operation."""
    # CUDA copies a list one by one if the strides of a single pair differ.
    pairs = list(zip(batch.values(), values, strict=True))
    for contiguous in (True, False):
        chosen = [pair for pair in pairs if pair[0].is_contiguous() is contiguous]
        if chosen:
            torch._foreach_copy_([pair[0] for pair in chosen], [pair[1] for pair in chosen])
