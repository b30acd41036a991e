"""Tracks which parameters were used in training, and therefore are updated by an optimizer."""

# Note [16-bit gradients and several uses of a weight]
#
# With `grad_dtype` FP32, autograd converts the gradient of every use of a 16-bit weight to FP32 and
# sums the uses. The conversion reads 2 and writes 4 bytes per element. The addition to the bucket
# then reads 4 + 4 and writes 4 bytes. The sum of several uses needs the conversion: without it,
# autograd sums them in 16 bits. A single use does not: with `grad_dtype` None, autograd adds its
# 16-bit gradient to the bucket in one operation, which reads 2 + 4 and writes 4 bytes.
#
# How often a backward uses a weight is known only from its graph, which can differ between
# microbatches. So every graph is searched. A function whose backward runs another backward, such as
# reentrant checkpointing, hides a part of the graph; then no weight counts as used once. It has to
# enable gradients for that.
#
# Under autocast, weights are FP32, and the backward of the cast converts their gradient. A hook on
# every cast could add the 16-bit gradient, but would cost more host time than the conversion.

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.errors import TrainingError
from distmp.utils.autograd import autograd_graph


class UsedParameters:
    """Tracks which parameters have ever had a gradient, on any rank.

    A parameter that no rank has ever used is not updated, as in plain torch: its `.grad` is None,
    the optimizer keeps no state for it and applies no weight decay. From its first gradient on, a
    step in which no rank uses it counts as a zero gradient, so momentum and weight decay continue.
    Excluding it from such a step too would need an exchange between ranks, and the host would have
    to wait for it, in every step.

    Dropped microbatches and skipped steps do not count as use, because they change nothing.

    In each step call `begin_step`; for each microbatch `mark_used` for each gradient, then
    `end_microbatch`; then `exchange_flags`; and `end_step` when it is known whether the step was
    skipped. While there are unused parameters, `exchange_flags` reduces one flag for each of them
    and the host waits for the result. Once all are used, nothing is exchanged.

    Args:
        parameters: Names of parameters that are not used yet, in the same order on all ranks.
        group: The ranks; None for a single process.
        device: The device of the flags.

    Attributes:
        computing_loss: Set while the loss is computed; a gradient is then an error.
    """

    def __init__(
        self, parameters: Iterable[str], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.computing_loss = False
        self._group = group
        self._device = device
        self._all = [*parameters]
        self._unused = dict.fromkeys(self._all)  # in the same order on all ranks
        # Parameters used for the first time in the last step, and whether that step was skipped.
        self._newly_used: set[str] = set()
        self._skipped: Tensor | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step; discard what an unfinished step has recorded."""
        # Parameters that this rank has used in this step: in the current microbatch, in
        # microbatches that count, and in microbatches that may be dropped, with a flag on the
        # device.
        self._in_microbatch: set[str] = set()
        self._in_step: set[str] = set()
        self._droppable: list[tuple[set[str], Tensor]] = []

    def mark_used(self, parameter: str) -> None:
        """Record a gradient of this parameter on this rank.

        Raises:
            TrainingError: While the loss is computed.
        """
        if self.computing_loss:
            raise TrainingError(
                "the loss function has called backward (or torch.autograd.grad, with a sharded "
                f"strategy), which would add the gradient of {parameter!r} with the wrong scale; "
                "return the sum of all losses, whose backward the engine calls"
            )
        if parameter in self._unused:
            self._in_microbatch.add(parameter)

    def end_microbatch(self, kept: Tensor | None = None) -> None:
        """End a microbatch; it counts unless `kept`, 0-dim bool, is False (dropped)."""
        if kept is None:
            self._in_step |= self._in_microbatch
        elif self._in_microbatch:
            self._droppable.append((self._in_microbatch, kept))
        self._in_microbatch = set()

    def exchange_flags(self) -> None:
        """Determine the parameters that any rank has used in this step; all ranks must call it."""
        self._apply_last_step()
        if not self._unused:
            return
        self.end_microbatch()
        flags = zip(self._unused, self._used_on_any_rank(), strict=True)
        self._newly_used = {parameter for parameter, used in flags if used}
        self.begin_step()

    def end_step(self, skipped: Tensor) -> None:
        """End a step; the host does not wait.

        Args:
            skipped: 0-dim, nonzero if the step was skipped; the same on all ranks.
        """
        self._skipped = skipped

    def end_failed_step(self) -> None:
        """Do not count a step that has failed before `end_step`."""
        if self._skipped is None:
            self._newly_used = set()

    @property
    def not_known_as_used(self) -> Container[str]:
        """The parameters whose gradients have to be recorded."""
        return self._unused

    @property
    def unused_in_step(self) -> set[str]:
        """The parameters that no rank has used up to this step, so they are not updated."""
        return self._unused.keys() - self._newly_used

    @property
    def unused(self) -> list[str]:
        """The parameters that no step has used; the host waits for the last step."""
        self._apply_last_step()
        return list(self._unused)

    @unused.setter
    def unused(self, parameters: Iterable[str]) -> None:
        selected = set(parameters)
        self._unused = {name: None for name in self._all if name in selected}
        self._newly_used = set()
        self._skipped = None
        self.begin_step()

    def _apply_last_step(self) -> None:
        """Count the last step, unless it was skipped."""
        if self._newly_used and (self._skipped is None or not on_host(self._skipped)):
            self._unused = {key: None for key in self._unused if key not in self._newly_used}
        self._newly_used = set()
        self._skipped = None

    def _used_on_any_rank(self) -> list[int]:
        """Return for each unused parameter whether any rank has had a gradient of it."""
        if self._group is None and not self._droppable:
            return [parameter in self._in_step for parameter in self._unused]
        flags = self._flags(self._in_step)
        for used, kept in self._droppable:
            flags = flags.maximum(self._flags(used) * kept)
        if self._group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
        return on_host(flags)

    def _flags(self, used: set[str]) -> Tensor:
        flags = [parameter in used for parameter in self._unused]
        return torch.tensor(flags, dtype=torch.uint8, device=self._device)


def on_host(values: Tensor) -> Any:
    """Copy values to the host, which waits for them."""
    return values.tolist()


_GRADIENT_SWITCHES = {"enable_grad", "set_grad_enabled"}


def weights_used_once(loss: Tensor) -> set[int]:
    """Return the weights whose gradient is not a sum over several uses.

    Args:
        loss: The tensor from which backward starts.

    Returns:
        The `id` of each leaf of the graph that only one operation uses, and only once.
    """
    operations, leaves = autograd_graph(loss)
    if any(map(_runs_backward, {*map(type, operations)})):
        return set()
    uses = Counter(map(id, leaves))
    return {weight for weight, count in uses.items() if count == 1}


@functools.cache
def _runs_backward(node_type: type) -> bool:
    """Return whether a node is of a Python function whose backward may run another backward."""
    function = getattr(node_type, "_forward_cls", None)
    if function is None:
        return False
    codes = [
        getattr(inspect.unwrap(method), "__code__", None)
        for method in (function.backward, function.vjp)
    ]
    return any(code is None or not _GRADIENT_SWITCHES.isdisjoint(code.co_names) for code in codes)
