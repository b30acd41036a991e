"""The one decision of a step: every rank reduces the same small vector and concludes the same.

With S the loss scale, N the global weight and n0 the nominal weight, backward ran on
`loss_sum * S / n0` and gradients were reduced by SUM. So the gradient of the global mean is G / u
with `u = S * N / n0`, and clipping to `max_norm` multiplies it by `c = min(1, max_norm / norm)`.
Both are one division by `grad_scale = u / c`, which a fused optimizer does inside its own kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.scaling.norms import chunk_norms

# Keeps max_norm / norm finite for a zero gradient; torch's clip_grad_norm_ uses the same value.
CLIP_EPSILON = 1e-6


class GradientPart(NamedTuple):
    """Gradients that this rank holds, all of them with the same number of copies.

    Attributes:
        tensors: Local FP32 tensors (of a DTensor, its local shard).
        replicas: On how many ranks these very values stand.
    """

    tensors: list[Tensor]
    replicas: int


class StepDecision(NamedTuple):
    """What all ranks agreed on; every field is a 0-dim tensor on the device.

    Attributes:
        overflow: bool, whether a gradient or the weight of any rank was not finite, the global
            weight is negative, or nothing is left because all that there was has been dropped.
        dropped: FP64, how many microbatches of all ranks were left out as not finite.
        empty: bool, whether no rank had anything to learn from (N = 0).
        found_inf: FP32, 1 where the optimizer has to skip (overflow, empty, or for a reason that
            `skipping` has added), else 0.
        grad_scale: FP32, what the optimizer divides gradients by.
        grad_norm: FP64, norm of the gradient of the global mean, before clipping.
        weight: FP64, the global weight N.
        loss: FP64, the global mean loss.
        stop: bool, whether any rank asked to stop.
    """

    overflow: Tensor
    dropped: Tensor
    empty: Tensor
    found_inf: Tensor
    grad_scale: Tensor
    grad_norm: Tensor
    weight: Tensor
    loss: Tensor
    stop: Tensor

    def skipping(self, skip: Tensor) -> StepDecision:
        """Return the decision with the update left out where `skip`, 0-dim bool, is true."""
        return self._replace(found_inf=self.found_inf.maximum(skip.to(torch.float32)))


def local_stats(
    parts: Iterable[GradientPart],
    loss_sum: Tensor,
    weight: Tensor,
    *,
    stop: bool,
    dropped: Tensor | float = 0.0,
    device: torch.device,
) -> Tensor:
    """Return this rank's contribution, FP64 of shape (6,), to be summed over all ranks.

    It holds the squared norm (divided by the number of replicas), the number of non-finite chunks
    of gradients, the loss sum, the weight, the stop request and the number of dropped microbatches.
    One read of the gradients, no host wait.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    non_finite = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        if part.tensors:
            norms = chunk_norms(part.tensors).to(torch.float64)
            squares = squares + norms.square().sum() / part.replicas
            non_finite = non_finite + (~norms.isfinite()).sum()
    return pack(squares, non_finite, loss_sum, weight, float(stop), dropped, device=device)


def pack(*numbers: Tensor | float, device: torch.device) -> Tensor:
    """Return 0-dim tensors and numbers as one FP64 vector on `device`, without a host wait."""
    return torch.stack(
        [
            number.to(device, torch.float64)
            if isinstance(number, Tensor)
            else torch.full((), number, dtype=torch.float64, device=device)
            for number in numbers
        ]
    )


def all_reduce_stats(measured: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum the contributions of all ranks in place; `group` None means a single process."""
    if group is not None:
        dist.all_reduce(measured, group=group)
    return measured


def decide_step(
    total: Tensor, loss_scale: Tensor, nominal_weight: float, max_norm: float | None
) -> StepDecision:
    """Draw the same conclusion from the same total on every rank, without waiting for the device.

    Args:
        total: FP64 of shape (6,), the sum of what `local_stats` returned on every rank.
        loss_scale: 0-dim, the scale that backward ran with.
        nominal_weight: n0, the constant that backward divided by.
        max_norm: Clip the gradient to this norm; None leaves it as it is.
    """
    squares, non_finite, loss_sum, weight, stop, dropped = total.unbind()
    scaled_norm = squares.sqrt()
    no_weight = weight == 0
    all_dropped = no_weight & (dropped > 0)
    bad_weight = ~weight.isfinite() | (weight < 0)
    overflow = ~scaled_norm.isfinite() | (non_finite > 0) | bad_weight | all_dropped
    empty = no_weight & ~all_dropped
    unscale = loss_scale.to(torch.float64) * weight / nominal_weight
    # Over a weight that is negative or infinite there is no mean whose gradient has a norm.
    grad_norm = torch.where(bad_weight, torch.nan, scaled_norm / unscale)
    grad_scale = unscale
    if max_norm is not None:
        grad_scale = unscale / (max_norm / (grad_norm + CLIP_EPSILON)).clamp(max=1.0)
    return StepDecision(
        overflow=overflow,
        dropped=dropped,
        empty=empty,
        found_inf=(overflow | empty).to(torch.float32),
        grad_scale=grad_scale.to(torch.float32),
        grad_norm=grad_norm,
        weight=weight,
        loss=loss_sum / weight,
        stop=stop > 0,
    )
