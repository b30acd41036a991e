"""The step decision: all ranks reduce one small vector and derive the same decision from it.

With S the loss scale, N the global weight and n0 the nominal weight, backward ran on
`loss_sum * S / n0` and gradients were reduced by SUM. So the gradient of the global mean is G / u
with `u = S * N / n0`, and clipping to `max_norm` multiplies it by `c = min(1, max_norm / norm)`.
Together they are one division by `grad_scale = u / c`, which fused optimizers do in their kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.scaling.norms import CHUNK, chunk_norms, chunk_squares, pairwise_sums, summed
from distmp.utils.host_copy import cpu_number

# Keeps max_norm / norm finite for a zero gradient; torch's clip_grad_norm_ uses the same value.
CLIP_EPSILON = 1e-6
_FP32 = torch.finfo(torch.float32)
# Gradients are multiplied by this first if FP32 does not represent their divisor.
PRESCALE = 2.0**-64
# Number of sums over ranks that a decision needs.
SUMS = 6


class GradientPart(NamedTuple):
    """Gradients of this rank that are replicated on the same number of ranks.

    Attributes:
        tensors: Local FP32 tensors of any shape; local shards of DTensors.
        replicas: Number of ranks that hold a copy of these values, this rank included.
    """

    tensors: list[Tensor]
    replicas: int


class StepDecision(NamedTuple):
    """The decision of all ranks on a step; every field is a 0-dim tensor on the device.

    Attributes:
        overflow: bool, whether a gradient or the weight of any rank was not finite, the global
            weight is negative, all microbatches with a weight were dropped, or, on a GPU, the
            divisor is beyond FP32.
        dropped: FP64, number of microbatches of all ranks that were dropped as non-finite.
        empty: bool, whether the global weight N is 0 without dropped microbatches.
        found_inf: FP32, 1 if the optimizer has to skip (overflow, empty, or a condition added by
            `skipping`), else 0.
        divisor: FP64, divisor of the gradients.
        grad_scale: FP32, divisor of the gradients in the optimizer.
        grad_norm: FP64, norm of the gradient of the global mean loss, before clipping.
        weight: FP64, the global weight N.
        loss: FP64, the global mean loss.
        stop: bool, whether any rank requested to stop.

    Example:
        >>> import torch
        >>> from distmp.scaling import step_decision as decision
        >>> gradients = decision.GradientPart([torch.tensor([3.0, 4.0])], replicas=1)
        >>> loss_sum, weight, cpu = torch.tensor(6.0), torch.tensor(2.0), torch.device("cpu")
        >>> stats = decision.local_stats([gradients], loss_sum, weight, stop=False, device=cpu)
        >>> total = decision.all_reduce_stats(stats, group=None)
        >>> step = decision.decide_step(total, torch.tensor(1.0), nominal_weight=1.0, max_norm=None)
        >>> float(step.grad_norm), float(step.loss), bool(step.overflow)
        (2.5, 3.0, False)
    """

    overflow: Tensor
    dropped: Tensor
    empty: Tensor
    found_inf: Tensor
    divisor: Tensor
    grad_scale: Tensor
    grad_norm: Tensor
    weight: Tensor
    loss: Tensor
    stop: Tensor

    def skipping(self, skip: Tensor) -> StepDecision:
        """Return the decision with the update skipped if `skip`, 0-dim bool, is true."""
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
    """Return the contribution of this rank to the step decision, FP64 of shape (6,).

    The elements are the squared norm (divided by the number of replicas), the number of non-finite
    chunks of gradients, the loss sum, the weight, the stop request and the number of dropped
    microbatches. Reads the gradients once; the host does not wait.

    Args:
        parts: The gradients of this rank.
        loss_sum: 0-dim, sum of the losses of this rank.
        weight: 0-dim, sum of the weights of this rank.
        stop: Whether this rank requests to stop.
        dropped: Number of microbatches of this rank that were dropped as non-finite.
        device: Device of the result.
    """
    squares, non_finite = [], []
    for part in parts:
        if part.tensors:
            norms = chunk_norms(part.tensors)
            squares.append(norms.square().sum() / part.replicas)
            non_finite.append(not_finite(norms).sum())
    sums = (summed(squares, device), summed(non_finite, device), loss_sum, weight)
    return pack(*sums, float(stop), dropped, device=device)


def pack(*numbers: Tensor | float, device: torch.device) -> Tensor:
    """Return 0-dim tensors and numbers as one FP64 vector on `device`, without synchronization."""
    tensors = [
        number.to(device)
        if isinstance(number, Tensor)
        else torch.full((), number, dtype=torch.float64, device=device)
        for number in numbers
    ]
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.to(torch.float64) for tensor in tensors]
    # Numbers of one dtype, such as the losses of all microbatches, are converted in one kernel.
    return torch.stack(tensors).to(torch.float64)


def not_finite(norms: Tensor) -> Tensor:
    """Return which of some nonnegative numbers are infinite or NaN.

    Two kernels, where `~norms.isfinite()` launches five.
    """
    return ~(norms < math.inf)


def all_reduce_stats(stats: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum the contributions of all ranks in place; `group` None means a single process."""
    if group is not None:
        dist.all_reduce(stats, group=group)
    return stats


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return c, by which gradients of this norm are multiplied to clip them to `max_norm`."""
    return (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)


def divisor_fits(divisor: Tensor, coefficient: Tensor | float = 1.0) -> bool:
    """Return whether FP32 represents `divisor / coefficient`; True on a GPU, without waiting."""
    if divisor.device.type != "cpu":
        return True
    return not 1 / _FP32.tiny < cpu_number(divisor / coefficient) < math.inf


def divisor_overflows(divisor: Tensor) -> Tensor:
    """Return whether the step has to be skipped because FP32 does not represent the divisor.

    On the CPU it is False, because gradients are multiplied by `PRESCALE` first. On a GPU this
    would take another pass over the gradients in every step, or a host-device synchronization.
    """
    if divisor.device.type == "cpu":
        return torch.zeros_like(divisor, dtype=torch.bool)
    return divisor > _FP32.max


def decide_step(
    total: Tensor, loss_scale: Tensor, nominal_weight: float, max_norm: float | None
) -> StepDecision:
    """Return the same decision on every rank, without waiting for the device.

    Args:
        total: FP64 of shape (6,), the sum over ranks of the results of `local_stats`.
        loss_scale: 0-dim, the scale that backward ran with.
        nominal_weight: n0, the constant that backward divided by.
        max_norm: Clip the gradient to this norm; None disables clipping.
    """
    squares, non_finite, loss_sum, weight, stop, dropped = total.unbind()
    scaled_norm = squares.sqrt()
    no_weight = weight == 0
    all_dropped = no_weight & (dropped > 0)
    bad_weight = not_finite(weight) | (weight < 0)
    overflow = not_finite(scaled_norm) | (non_finite > 0) | bad_weight | all_dropped
    empty = no_weight & ~all_dropped
    unscale = loss_scale.to(torch.float64) * weight / nominal_weight
    # The mean over a negative or infinite weight is undefined, and so is the norm of its gradient.
    grad_norm = torch.where(bad_weight, torch.nan, scaled_norm / unscale)
    divisor = unscale
    if max_norm is not None:
        divisor = unscale / clip_coefficient(grad_norm, max_norm)
        overflow = overflow | divisor_overflows(divisor)
    return StepDecision(
        overflow=overflow,
        dropped=dropped,
        empty=empty,
        found_inf=(overflow | empty).to(torch.float32),
        divisor=divisor,
        grad_scale=divisor.to(torch.float32),
        grad_norm=grad_norm,
        weight=weight,
        loss=loss_sum / weight,
        stop=stop > 0,
    )


def ordered_total(
    shards: Sequence[Tensor],
    losses: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    stop: bool,
    dropped: Tensor | float,
    more: Sequence[float] = (),
    exact: Tensor | None = None,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Return the sum of `local_stats` over all ranks, bitwise the same for any 2^k ranks.

    Args:
        shards: This rank's shard of every gradient bucket, 1-dim FP32; the number of elements is a
            multiple of `CHUNK`.
        losses: Loss sum of each microbatch of this rank, 0-dim; the same number on every rank.
        weights: Weight of each microbatch of this rank, 0-dim.
        stop: Whether this rank requests to stop.
        dropped: Number of microbatches of this rank that were dropped as non-finite.
        more: Further numbers whose sums over ranks are exact, appended to the result.
        exact: FP64, 1-dim, integers to sum, appended to the result.
        group: The ranks, in the order of their microbatches; None for a single process.
        device: Device of the reduction.
    """
    rank = 0 if group is None else dist.get_rank(group)
    world_size = 1 if group is None else dist.get_world_size(group)
    counts = pack(float(stop), dropped, *more, device=device)
    if exact is not None:
        counts = torch.cat([counts, exact])
    local = torch.cat([pack(*losses, *weights, device=device), chunk_squares(shards)])
    lengths = [len(losses), len(weights), *(len(shard) // CHUNK for shard in shards)]
    # Each sum has one row per rank. A rank fills only its row, so the all-reduce gathers the rows.
    leaves = torch.zeros(world_size * len(local), dtype=torch.float64, device=device)
    own = [rows.view(world_size, -1)[rank] for rows in _split(leaves, lengths, world_size)]
    torch._foreach_copy_(own, local.split(lengths))
    vector = torch.cat([counts, leaves])
    if group is not None:
        dist.all_reduce(vector, group=group)
    counts, leaves = vector[: len(counts)], vector[len(counts) :]
    sums = pairwise_sums(_split(leaves, lengths, world_size))
    loss_and_weight, squares = sums[:2], sums[2:]
    square = pairwise_sums([squares])
    return torch.cat([square, not_finite(square).double(), loss_and_weight, counts])


def _split(leaves: Tensor, lengths: Sequence[int], world_size: int) -> Sequence[Tensor]:
    return leaves.split([world_size * length for length in lengths])
