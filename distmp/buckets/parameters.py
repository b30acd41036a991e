"""Parameters in flat buffers of the type the module computes with, and what the optimizer steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from distmp.buckets.gradients import Fp32GradBuckets
from distmp.buckets.layout import BucketLayout
from distmp.distributed.collectives import all_gather
from distmp.errors import ConfigError


class _ParameterPlace:
    """Where a parameter was put, so that one is noticed that is no longer there.

    Args:
        name: Of the parameter.
        parameter: It.
        has_master: Whether its value comes from a master weight, so that writes to it are lost.
    """

    __slots__ = ("_address", "_has_master", "_name", "_parameter", "_version")

    def __init__(self, name: str, parameter: nn.Parameter, *, has_master: bool) -> None:
        self._name = name
        self._parameter = parameter
        self._address = parameter.data_ptr()
        self._has_master = has_master
        self.settle()

    def settle(self) -> None:
        """Take note that the parameter has the value that it is to have."""
        self._version = self._parameter._version  # torch's count of writes

    def check(self) -> None:
        """Refuse a parameter that has left its place, or was written to in vain.

        Raises:
            ConfigError: Naming it.
        """
        if self._parameter.data_ptr() != self._address:
            raise ConfigError(
                "model",
                self._name,
                "was given other memory (by model.to(), .data = or another engine), which the "
                "optimizer does not step; change a model before the engine is built",
            )
        if self._has_master and self._parameter._version != self._version:
            raise ConfigError(
                "model",
                self._name,
                "was written to (as by model.load_state_dict), but its value comes from the FP32 "
                "master weight of the optimizer; write to a model before the engine is built, or "
                "use engine.load_state_dict",
            )


class _Flat(NamedTuple):
    """The flat buffers of one bucket."""

    stepped: Tensor  # FP32, what the optimizer steps: everything, or this rank's shard
    own: Tensor  # the same part of the parameters, in the type the module computes with
    parameters: Tensor  # all of them


class FlatParameters:
    """Parameters in flat buffers of the buckets' layout, so that an update is published at once.

    The optimizer steps FP32 tensors (`named`) whose `.grad` lies in the gradient buckets:

    - for parameters held in 16 bits, FP32 master weights: 4 more bytes per parameter, divided by
      the number of ranks where the buckets are sharded;
    - for FP32 parameters, the parameters themselves, or this rank's shares of them.

    With sharded buckets each rank steps its own shares, and the ranks gather the parameters in the
    type the module computes with (ZeRO stage 1: Rajbhandari et al. 2020).

    Args:
        buckets: The gradient buckets of the parameters.
        values: The FP32 value of each parameter by its name. They are taken out one by one, so that
            there are never two FP32 copies of the whole model.

    Attributes:
        named: What the optimizer steps, by the parameter's name, in bucket order. With sharded
            buckets it is 1-dim, and empty where another rank has the parameter.
        shares: With sharded buckets, which elements of the flattened parameter that is, by name.
    """

    def __init__(self, buckets: Fp32GradBuckets, values: dict[str, Tensor]) -> None:
        self._buckets = buckets
        self.named: dict[str, Tensor] = {}
        self.shares: dict[str, slice] = {}
        self._flat: list[_Flat] = []
        self._places: list[_ParameterPlace] = []
        for index, layout in enumerate(buckets.layouts):
            if buckets.sharded or layout.parameters[0].dtype != torch.float32:
                self._lay_out(index, layout, values)
            else:
                self.named.update(zip(layout.names, layout.parameters, strict=True))
        self.publish()

    def check_places(self) -> None:
        """Refuse parameters that are not where they were put, see `_ParameterPlace.check`."""
        for place in self._places:
            place.check()

    @torch.no_grad()
    def publish(self) -> None:
        """Make what the optimizer stepped the parameters that the module computes with."""
        pending = []
        for flat in self._flat:
            if flat.own.dtype != flat.stepped.dtype:
                flat.own.copy_(flat.stepped)
            if self._buckets.sharded:
                pending.append(all_gather(flat.parameters, flat.own, self._buckets.group))
        for work in pending:
            work.wait()
        for place in self._places:
            place.settle()

    @torch.no_grad()
    def _lay_out(self, bucket: int, layout: BucketLayout, values: dict[str, Tensor]) -> None:
        dtype = layout.parameters[0].dtype
        parameters = torch.zeros(layout.size, dtype=dtype, device=layout.device)
        part = slice(0, layout.size)
        if self._buckets.sharded:
            part = layout.shard(self._buckets.rank, self._buckets.world_size)
        own = parameters[part]
        stepped = own
        if dtype != torch.float32:
            stepped = torch.zeros_like(own, dtype=torch.float32)
        self._flat.append(_Flat(stepped, own, parameters))
        views = layout.views(parameters)
        masters = None if self._buckets.sharded else layout.views(stepped)
        for index, (name, share) in enumerate(zip(layout.names, layout.shares(part), strict=True)):
            value = values.pop(name)
            if masters is None:
                start = layout.offsets[index] - part.start
                master = stepped[max(start + share.start, 0) : max(start + share.stop, 0)]
                master.copy_(value.reshape(-1)[share])
                self.shares[name] = share
            else:
                master = masters[index]
                master.copy_(value)
            views[index].copy_(value)
            layout.parameters[index].data = views[index]
            has_master = dtype != torch.float32
            self._places.append(
                _ParameterPlace(name, layout.parameters[index], has_master=has_master)
            )
            # An optimizer wants a leaf of its own; it shares the memory of the flat buffer.
            self.named[name] = master.detach().requires_grad_()
            self._buckets.attach(bucket, index, self.named[name])


class PureParameters:
    """16-bit parameters that the optimizer steps themselves, without a master copy.

    Their gradients are summed in the FP32 buckets like all others, and rounded once for the
    optimizer. FP32 parameters are stepped as they are.

    Args:
        buckets: The gradient buckets of the parameters, not sharded.

    Attributes:
        named: What the optimizer steps, by the parameter's name: the parameter, or a leaf on its
            memory whose `.grad` has 16 bits.
        shares: Empty; nothing is sharded.
    """

    def __init__(self, buckets: Fp32GradBuckets) -> None:
        self.named: dict[str, Tensor] = {}
        self.shares: dict[str, slice] = {}
        self._rounded: list[tuple[nn.Parameter, Tensor]] = []
        self._places: list[_ParameterPlace] = []
        for layout in buckets.layouts:
            for name, parameter in zip(layout.names, layout.parameters, strict=True):
                self.named[name] = parameter
                if parameter.dtype != torch.float32:
                    self.named[name] = parameter.detach().requires_grad_()
                    self._rounded.append((parameter, self.named[name]))
                    self._places.append(_ParameterPlace(name, parameter, has_master=False))

    def check_places(self) -> None:
        """Refuse parameters that are not where they were put, see `_ParameterPlace.check`."""
        for place in self._places:
            place.check()

    def round_gradients(self) -> None:
        """Give the optimizer what the buckets hold, in the type of its weights."""
        for parameter, weight in self._rounded:
            gradient = parameter.grad
            weight.grad = None if gradient is None else gradient.to(weight.dtype)

    def publish(self) -> None:
        """Free the rounded gradients; the parameters are those that the optimizer stepped."""
        for _, weight in self._rounded:
            weight.grad = None
