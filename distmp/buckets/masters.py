"""What the optimizer steps for parameters that a module holds in 16 bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from distmp.buckets.gradients import Fp32GradBuckets


class MasterWeights:
    """FP32 master copies of parameters that the module computes with in 16 bits.

    Masters and parameters live in flat buffers of the buckets' layout, so that publishing an update
    is one cast per bucket. The optimizer steps the masters; the `.grad` of a master is the
    parameter's place in its bucket, so no gradient is copied either.

    A parameter that stays in FP32 is its own master.

    Args:
        buckets: The gradient buckets of the parameters, which still hold their FP32 values.
        compute_dtype: The 16-bit type of the parameters from now on.
        kept: Names of the parameters that the module holds in FP32.

    Attributes:
        named: The FP32 master of each parameter by the parameter's name, in bucket order.
    """

    def __init__(
        self,
        buckets: Fp32GradBuckets,
        compute_dtype: torch.dtype,
        kept: Collection[str] = (),
    ) -> None:
        self.named: dict[str, Tensor] = {}
        self._flat: list[tuple[Tensor, Tensor]] = []
        for layout, buffer, gradients in zip(
            buckets.layouts, buckets.buffers, buckets.views, strict=True
        ):
            masters = torch.zeros_like(buffer)
            published = torch.zeros_like(buffer, dtype=compute_dtype)
            self._flat.append((masters, published))
            for name, parameter, master, published_view, gradient in zip(
                layout.names,
                layout.parameters,
                layout.views(masters),
                layout.views(published),
                gradients,
                strict=True,
            ):
                master.copy_(parameter.detach())
                parameter.data = master if name in kept else published_view
                # An optimizer wants a leaf of its own; it shares the memory of the flat buffer.
                self.named[name] = master.detach().requires_grad_()
                buckets.attach(self.named[name], gradient)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that the module computes with."""
        for masters, published in self._flat:
            published.copy_(masters)


class PureWeights:
    """16-bit parameters that the optimizer steps themselves, without a master copy.

    Their gradients are summed in the FP32 buckets, and rounded once for the optimizer.

    Args:
        buckets: The gradient buckets of the parameters.
        dtypes: The type in which the module holds each parameter from now on.

    Attributes:
        named: What the optimizer steps by the parameter's name: a leaf on the parameter's memory.
    """

    def __init__(self, buckets: Fp32GradBuckets, dtypes: Mapping[str, torch.dtype]) -> None:
        self.named: dict[str, Tensor] = {}
        self._gradients: list[tuple[Tensor, Tensor]] = []
        for layout, gradients in zip(buckets.layouts, buckets.views, strict=True):
            for name, parameter, gradient in zip(
                layout.names, layout.parameters, gradients, strict=True
            ):
                parameter.data = parameter.data.to(dtypes[name])
                # The parameter's own `.grad` is its place in the bucket, which is FP32.
                self.named[name] = parameter.detach().requires_grad_()
                self._gradients.append((self.named[name], gradient))

    def round_gradients(self) -> None:
        """Give the optimizer the sums of the buckets in the type of its weights."""
        for weight, gradient in self._gradients:
            weight.grad = gradient.to(weight.dtype)

    def drop_gradients(self) -> None:
        """Free what `round_gradients` made."""
        for weight, _ in self._gradients:
            weight.grad = None
