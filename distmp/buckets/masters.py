"""FP32 master weights of parameters that a module holds in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from distmp.buckets.gradients import Fp32GradBuckets


class MasterWeights:
    """FP32 master copies of parameters that the module computes with in 16 bits.

    Masters and parameters live in flat buffers of the buckets' layout, so that publishing an update
    is one cast per bucket. The optimizer steps the masters; the `.grad` of a master is the
    parameter's place in its bucket, so no gradient is copied either.

    Args:
        buckets: The gradient buckets of the parameters, which still hold their FP32 values.
        compute_dtype: The 16-bit type of the parameters from now on.

    Attributes:
        named: The FP32 master of each parameter by the parameter's name, in bucket order.
    """

    def __init__(self, buckets: Fp32GradBuckets, compute_dtype: torch.dtype) -> None:
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
                parameter.data = published_view
                # An optimizer wants a leaf of its own; it shares the memory of the flat buffer.
                self.named[name] = master.detach().requires_grad_()
                buckets.attach(self.named[name], gradient)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that the module computes with."""
        for masters, published in self._flat:
            published.copy_(masters)
