"""Flat buffers of parameters, and the tensors that the optimizer updates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from distmp.buckets.gradients import Fp32GradBuckets
from distmp.buckets.layout import BucketLayout, refuse_changed
from distmp.distributed.collectives import all_gather
from distmp.errors import TrainingError, require
from distmp.utils.host_copy import HostCopy
from distmp.utils.tensor_trees import version_counters

# Number of steps before which copies of master weights are compared with the published values.
WATCHED_STEPS = 4
MOVED = (
    "was moved to other memory (by model.to(), .data = or another engine), which the optimizer "
    "does not step; change a model before you build the engine"
)
WRITTEN = (
    "was written to (as by another optimizer's step(), model.load_state_dict, param.data.mul_(), "
    "in forward or in a hook), but its value is copied from the optimizer's FP32 master weight; "
    "write to a model before you build the engine, use engine.load_state_dict, or change "
    "engine.weights() between steps and call engine.publish_weights(); without an engine, change "
    "FlatParameters.named and call publish_weights(overwrite=True)"
)
UNPUBLISHED = (
    "engine.weights() were changed without engine.publish_weights(), so forward would use other "
    "weights than the optimizer; call it after the change, on every rank"
)


class OptimizerParameters:
    """The tensors that the optimizer updates for the parameters of some buckets.

    Attributes:
        named: The tensors by the parameter's name, in bucket order.
        shard_ranges: With sharded buckets, by name, which elements of the parameter, flattened in
            the order of its memory, this rank updates.
    """

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self.shard_ranges: dict[str, slice] = {}
        # Parameters in their final memory, the addresses of this memory, and those whose values are
        # copied from master weights, so that writes to them are lost.
        self._held: dict[str, nn.Parameter] = {}
        self._addresses: list[int] = []
        self._copies: dict[str, nn.Parameter] = {}
        self._versions: list[int] = []
        self._watched: _WatchedCopies | None = None

    def _hold(self, name: str, parameter: nn.Parameter) -> None:
        self._held[name] = parameter
        self._addresses.append(parameter.data_ptr())

    def check_storage(self) -> None:
        """Refuse parameters that were moved.

        Raises:
            ConfigError: Naming the first one.
        """
        addresses = list(map(Tensor.data_ptr, self._held.values()))
        refuse_changed(self._held, addresses, self._addresses, MOVED)

    def check_copies(self) -> None:
        """Refuse values of 16-bit copies that were not published, which would be lost.

        Raises:
            ConfigError: Naming the first one.
        """
        refuse_changed(
            self._copies, version_counters(self._copies.values()), self._versions, WRITTEN
        )
        if self._watched is not None:
            self._watched.check()

    def watch_copies(self) -> None:
        """Let `check_copies` find writes through `.data` in the next steps."""
        if self._copies:
            # Each step compares before its forward, after its backward and after its update.
            self._watched = _WatchedCopies(self._copies, 3 * WATCHED_STEPS)

    def round_gradients(self) -> None:
        """Round gradients to the dtype of 16-bit weights that the optimizer updates."""

    def publish_weights(self, *, overwrite: bool = False) -> None:
        """Copy the optimizer's weights to the parameters of the module."""


class _WatchedCopies:
    """Finds writes to copies of master weights, also through `.data`.

    The host reads the result of a comparison when it is complete, so it does not wait.

    Args:
        parameters: The copies by name, of a 16-bit dtype.
        comparisons: Number of comparisons.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], comparisons: int) -> None:
        self._parameters = parameters
        self._left = comparisons
        self._comparisons: list[HostCopy] = []
        self.record()

    @torch.no_grad()
    def _sums(self) -> Tensor:
        return torch.stack([each.view(torch.int16).sum() for each in self._parameters.values()])

    def record(self) -> None:
        """Accept the current values."""
        if self._left:
            self._recorded = self._sums()

    def check(self) -> None:
        """Refuse parameters that were written to since `record`.

        Raises:
            ConfigError: Naming the first one.
        """
        if self._left:
            self._left -= 1
            self._comparisons.append(HostCopy(self._sums() == self._recorded))
        while self._comparisons and self._comparisons[0].is_complete:
            equal = self._comparisons.pop(0).read()
            for name, is_equal in zip(self._parameters, equal, strict=True):
                require(is_equal, "model", name, WRITTEN)


class _Flat(NamedTuple):
    """The flat buffers of one bucket.

    Attributes:
        updated: FP32 weights that the optimizer updates: all of them, or this rank's shard.
        own: The same elements in the dtype of the module, a view of `parameters`.
        parameters: All parameters of the bucket in the dtype of the module.
    """

    updated: Tensor
    own: Tensor
    parameters: Tensor


class FlatParameters(OptimizerParameters):
    """Parameters in flat buffers with the layout of the buckets, updated by one copy per bucket.

    The optimizer updates FP32 tensors (`named`) whose `.grad` is a view of the gradient buckets:

    - FP32 master weights of 16-bit parameters: 4 more bytes per parameter, divided by the number of
      ranks if the buckets are sharded;
    - FP32 parameters themselves, or this rank's shards of them.

    With sharded buckets each rank updates its shards, and the ranks gather the parameters in the
    dtype of the module (ZeRO stage 1: Rajbhandari et al. 2020).

    Args:
        buckets: The gradient buckets of the parameters.
        values: The FP32 value of each parameter by its name. Values are removed one by one, so that
            there are never two FP32 copies of the full model.

    Attributes:
        named: The FP32 tensors to update, by the name of the parameter, in bucket order.
            With sharded buckets they are 1-dim, and empty if other ranks hold the parameter.
        shard_ranges: With sharded buckets, by name, which elements of the parameter, flattened in
            the order of its memory, this rank updates.

    Example:
        >>> import torch, distmp
        >>> from distmp.buckets import FlatParameters
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> values = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        >>> buckets = distmp.Fp32GradBuckets(model.bfloat16().named_parameters(), group=None)
        >>> flat = FlatParameters(buckets, values)
        >>> model.weight.dtype, flat.named["weight"].dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, buckets: Fp32GradBuckets, values: dict[str, Tensor]) -> None:
        super().__init__()
        self._buckets = buckets
        self._flat: list[_Flat] = []
        self._published: list[int] = []
        for index, layout in enumerate(buckets.layouts):
            if buckets.sharded or layout.parameters[0].dtype != torch.float32:
                self._flatten(index, layout, values)
            else:
                self.named.update(zip(layout.names, layout.parameters, strict=True))
        self.publish_weights(overwrite=True)

    def check_storage(self) -> None:
        """Refuse parameters that were moved, and weights that were not published.

        Raises:
            ConfigError: Naming the first parameter that was moved.
            TrainingError: If weights were written to since `publish_weights`.
        """
        super().check_storage()
        if version_counters(flat.updated for flat in self._flat) != self._published:
            raise TrainingError(UNPUBLISHED)

    @torch.no_grad()
    def publish_weights(self, *, overwrite: bool = False) -> None:
        """Copy the optimizer's weights to the parameters of the module.

        Args:
            overwrite: Whether values that other code has written to parameters may be lost, as
                after `named` was changed in the same way.

        Raises:
            ConfigError: Naming the first parameter with such a value.
        """
        if not overwrite:
            self.check_copies()
        pending = []
        for flat in self._flat:
            if flat.own.dtype != flat.updated.dtype:
                flat.own.copy_(flat.updated)
            if self._buckets.sharded:
                pending.append(all_gather(flat.parameters, flat.own, self._buckets.group))
        for work in pending:
            work.wait()
        self._versions = version_counters(self._copies.values())
        self._published = version_counters(flat.updated for flat in self._flat)
        if self._watched is not None:
            self._watched.record()

    @torch.no_grad()
    def _flatten(self, bucket: int, layout: BucketLayout, values: dict[str, Tensor]) -> None:
        dtype = layout.parameters[0].dtype
        parameters = torch.zeros(layout.size, dtype=dtype, device=layout.device)
        part = slice(0, layout.size)
        if self._buckets.sharded:
            part = layout.shard(self._buckets.rank, self._buckets.world_size)
        own = parameters[part]
        updated = own if dtype == torch.float32 else torch.zeros_like(own, dtype=torch.float32)
        self._flat.append(_Flat(updated, own, parameters))
        views = layout.views(parameters)
        masters = None if self._buckets.sharded else layout.views(updated)
        for index, name in enumerate(layout.names):
            value = values.pop(name)
            if masters is None:
                shard = layout.shard_range(index, part)
                start = layout.offsets[index] - part.start
                master = updated[max(start + shard.start, 0) : max(start + shard.stop, 0)]
                # Flattened like the parameter: in the order of its memory, such as channels_last.
                order = sorted(range(value.dim()), key=views[index].stride, reverse=True)
                master.copy_(value.permute(order).reshape(-1)[shard])
                self.shard_ranges[name] = shard
            else:
                master = masters[index]
                master.copy_(value)
            views[index].copy_(value)
            layout.parameters[index].data = views[index]
            self._hold(name, layout.parameters[index])
            if dtype != torch.float32:
                self._copies[name] = layout.parameters[index]
            # An optimizer needs a leaf tensor; it shares the memory of the flat buffer.
            self.named[name] = master.detach().requires_grad_()
            self._buckets.attach(bucket, index, self.named[name])


class PureParameters(OptimizerParameters):
    """16-bit parameters that the optimizer updates directly, without master weights.

    Their gradients are summed in the FP32 buckets like all others, and rounded once for the
    optimizer. FP32 parameters are updated directly with FP32 gradients.

    Args:
        buckets: The gradient buckets of the parameters, not sharded.

    Attributes:
        named: The tensors that the optimizer updates, by the parameter's name: FP32 parameters, and
            for 16-bit parameters a leaf tensor that shares their memory and has a 16-bit `.grad`.
        shard_ranges: Empty; nothing is sharded.

    Example:
        >>> import torch, distmp
        >>> from distmp.buckets import PureParameters
        >>> model = torch.nn.Linear(4, 1, bias=False).bfloat16()
        >>> pure = PureParameters(distmp.Fp32GradBuckets(model.named_parameters(), group=None))
        >>> pure.named["weight"].dtype
        torch.bfloat16
    """

    def __init__(self, buckets: Fp32GradBuckets) -> None:
        super().__init__()
        for layout in buckets.layouts:
            for name, parameter in zip(layout.names, layout.parameters, strict=True):
                self.named[name] = parameter
                if parameter.dtype != torch.float32:
                    self.named[name] = parameter.detach().requires_grad_()
                    self._hold(name, parameter)

    def round_gradients(self) -> None:
        """Round the gradients in the buckets to the dtype of the weights, for the optimizer."""
        for name, parameter in self._held.items():
            gradient, weight = parameter.grad, self.named[name]
            weight.grad = None if gradient is None else gradient.to(weight.dtype)

    def publish_weights(self, *, overwrite: bool = False) -> None:
        """Free the rounded gradients; the optimizer has updated the parameters themselves."""
        for name in self._held:
            self.named[name].grad = None
