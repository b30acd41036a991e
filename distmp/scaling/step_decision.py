"""The step decision: all ranks reduce one small vector and derive the same decision from it.

With S the loss scale, N the global weight and n0 the nominal weight, backward ran on
`loss_sum * S / n0` and gradients were reduced by SUM. So the gradient of the global mean is G / u
with `u = S * N / n0`, and clipping to `max_norm` multiplies it by `c = min(1, max_norm / norm)`.
Together they are one division by `grad_scale = u / c`, which fused optimizers do in their kernel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.scaling.norms import CHUNK, chunk_norms, chunk_squares, pairwise_sums, summed
from distmp.utils.host_copy import cpu_number, numbers_to_device

# Keeps max_norm / norm finite for a zero gradient; torch's clip_grad_norm_ uses the same value.
CLIP_EPSILON = 1e-6
_FP32 = torch.finfo(torch.float32)
# Gradients are multiplied by this first if FP32 does not represent their divisor.
PRESCALE = 2.0**-64
# Number of sums over ranks that a decision needs.
SUMS = 5


class GradientPart(NamedTuple):
    """Gradients of this rank that are replicated on the same number of ranks.

    Attributes:
        tensors: Local FP32 tensors of any shape; local shards of DTensors.
        replicas: Number of ranks that hold a copy of these values, this rank included.
    """

    tensors: list[Tensor]
    replicas: int


@dataclass(frozen=True)
class StepDecision:
    """The decision of all ranks on a step; its values are 0-dim tensors on the device.

    An update reads the attributes. The properties launch kernels when they are first read.

    Attributes:
        sums: FP64 of shape (5,), the sums of `local_stats` over ranks.
        divisor: Divisor of the gradients; not finite if the step has to be skipped. FP64, on a GPU
            FP32.
        grad_scale: FP32, divisor of the gradients in the optimizer.
        unusable: FP32, 1 for a step with an overflow or without weight, else 0.
        found_inf: FP32, 1 if the optimizer has to skip (`unusable`, or a condition added by
            `skipping`), else 0.
        mean_norm: FP64, `grad_norm` of a step whose weight is finite.

    Example:
        >>> import torch
        >>> from distmp.scaling import step_decision as decision
        >>> gradients = decision.GradientPart([torch.tensor([3.0, 4.0])], replicas=1)
        >>> loss_sum, weight, cpu = torch.tensor(6.0), torch.tensor(2.0), torch.device("cpu")
        >>> stats = decision.local_stats([gradients], [loss_sum], [weight], stop=False, device=cpu)
        >>> total = decision.all_reduce_stats(stats, group=None)
        >>> step = decision.decide_step(total, torch.tensor(1.0), nominal_weight=1.0, max_norm=None)
        >>> float(step.grad_norm), float(step.loss), bool(step.overflow)
        (2.5, 3.0, False)
    """

    sums: Tensor
    divisor: Tensor
    grad_scale: Tensor
    unusable: Tensor
    found_inf: Tensor
    mean_norm: Tensor

    @property
    def weight(self) -> Tensor:
        """The global weight N, FP64; NaN if a rank had a negative one."""
        return self.sums[2]

    @property
    def dropped(self) -> Tensor:
        """Number of microbatches of all ranks that were dropped as non-finite, FP64."""
        return self.sums[3]

    @cached_property
    def loss(self) -> Tensor:
        """The global mean loss, FP64."""
        return self.sums[1] / self.weight

    @cached_property
    def stop(self) -> Tensor:
        """Whether any rank requested to stop, bool."""
        return self.sums[4] > 0

    @cached_property
    def empty(self) -> Tensor:
        """Whether the global weight is 0 without dropped microbatches, bool."""
        return self.weight + self.dropped == 0

    @cached_property
    def overflow(self) -> Tensor:
        """Whether the step cannot be applied for another reason than `empty`, bool.

        A gradient or the weight of any rank was not finite, a weight was negative, all microbatches
        with a weight were dropped, or, on a GPU, the divisor is beyond FP32.
        """
        return not_finite(self.sums[0]) | ((self.unusable > 0) & ~self.empty)

    @cached_property
    def grad_norm(self) -> Tensor:
        """Norm of the gradient of the global mean loss before clipping, FP64.

        NaN if the weight is not finite: the mean is undefined then.
        """
        return torch.where(self.weight < math.inf, self.mean_norm, math.nan)

    def skipping(self, skip: Tensor) -> StepDecision:
        """Return the decision with the update skipped if `skip`, 0-dim bool, is true."""
        return replace(self, found_inf=self.found_inf.maximum(skip))


def local_stats(
    parts: Iterable[GradientPart],
    losses: Sequence[Tensor],
    weights: Sequence[Tensor | float],
    *,
    stop: bool,
    dropped: Tensor | float = 0.0,
    more: Sequence[float] = (),
    exact: Tensor | None = None,
    device: torch.device,
) -> Tensor:
    """Return the contribution of this rank to the step decision, FP64 of shape (5,) or more.

    The elements are the squared norm (divided by the number of replicas), the loss sum, the weight,
    the number of dropped microbatches and the stop request, then those of `more` and `exact`. Reads
    the gradients once; the host does not wait.

    Args:
        parts: The gradients of this rank. A norm that is not finite makes the sum of all squares
            infinite or NaN.
        losses: Loss sum of each microbatch of this rank, 0-dim.
        weights: Weight of each microbatch of this rank, 0-dim tensors or numbers; a negative one
            counts as NaN.
        stop: Whether this rank requests to stop.
        dropped: Number of microbatches of this rank that were dropped as non-finite.
        more: Further numbers to sum over ranks.
        exact: Further numbers, FP64, 1-dim.
        device: Device of the result.
    """
    squares = []
    for part in parts:
        if part.tensors:
            square = chunk_norms(part.tensors).square().sum()
            squares.append(square if part.replicas == 1 else square / part.replicas)
    numbers = [summed(squares, device).reshape(1), _sum(pack(*losses, device=device))]
    known = [dropped, float(stop), *more]
    if [weight for weight in weights if isinstance(weight, Tensor)]:
        numbers.append(_sum(_packed_weights(weights, device)))
    else:  # The host adds the weights, and sends the sum with the other numbers.
        known.insert(0, sum([weight if weight >= 0 else math.nan for weight in weights]))
    numbers.append(pack(*known, device=device))
    return torch.cat(numbers if exact is None else [*numbers, exact])


def _sum(numbers: Tensor) -> Tensor:
    return numbers if len(numbers) == 1 else numbers.sum(0, keepdim=True)


def _packed_weights(weights: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return weights as one FP64 vector; a negative weight becomes NaN."""
    # A sum of positive and negative weights would look plausible.
    return torch.threshold(pack(*weights, device=device), -sys.float_info.min, math.nan)


def pack(*numbers: Tensor | float, device: torch.device) -> Tensor:
    """Return 0-dim tensors and numbers as one FP64 vector on `device`, without synchronization."""
    if device.type == "cuda" and not any(isinstance(number, Tensor) for number in numbers):
        return numbers_to_device(numbers, torch.float64, device)
    tensors = [
        number.to(device)
        if isinstance(number, Tensor)
        else torch.full((), number, dtype=torch.float64, device=device)
        for number in numbers
    ]
    if len(tensors) == 1:
        return tensors[0].to(torch.float64).reshape(1)
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
    total: Tensor,
    loss_scale: Tensor | float,
    nominal_weight: float,
    max_norm: float | None,
    *,
    on_gpu: bool | None = None,
) -> StepDecision:
    """Return the same decision on every rank, without waiting for the device.

    Args:
        total: FP64 of shape (5,), the sum over ranks of the results of `local_stats`.
        loss_scale: The scale that backward ran with, a 0-dim tensor or a number.
        nominal_weight: n0, the constant that backward divided by.
        max_norm: Clip the gradient to this norm; None disables clipping.
        on_gpu: Whether the step runs on a GPU; None: whether `total` is there.
    """
    squares, _, weight, _, _ = total.unbind()
    unscale = weight * (loss_scale / nominal_weight)
    mean_norm = squares.sqrt() / unscale
    limit = math.inf if max_norm is None else max_norm
    # (norm + eps) / limit, in one kernel: the reciprocal of `clip_coefficient`. NaN after an
    # overflow and without a weight, also if the limit is infinite.
    ratio = torch.rsub(mean_norm, CLIP_EPSILON / limit, alpha=-1 / limit)
    on_gpu = total.is_cuda if on_gpu is None else on_gpu
    dtype = torch.float32 if on_gpu else torch.float64
    divisor = torch.mul(unscale, ratio.clamp(min=1.0), out=unscale.new_empty((), dtype=dtype))
    grad_scale = divisor.to(torch.float32)
    unusable = divisor.mul(0).nan_to_num(nan=1.0).to(torch.float32)
    return StepDecision(total, divisor, grad_scale, unusable, unusable, mean_norm)


def ordered_total(
    shards: Sequence[Tensor],
    losses: Sequence[Tensor],
    weights: Sequence[Tensor | float],
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
        weights: Weight of each microbatch of this rank, 0-dim tensors or numbers.
        stop: Whether this rank requests to stop.
        dropped: Number of microbatches of this rank that were dropped as non-finite.
        more: Further numbers whose sums over ranks are exact, appended to the result.
        exact: FP64, 1-dim, integers to sum, appended to the result.
        group: The ranks, in the order of their microbatches; None for a single process.
        device: Device of the reduction.
    """
    rank = 0 if group is None else dist.get_rank(group)
    world_size = 1 if group is None else dist.get_world_size(group)
    counts = pack(dropped, float(stop), *more, device=device)
    if exact is not None:
        counts = torch.cat([counts, exact])
    of_batches = pack(*losses, device=device), _packed_weights(weights, device)
    local = torch.cat([*of_batches, chunk_squares(shards)])
    lengths = [len(losses), len(weights), *(len(shard) // CHUNK for shard in shards)]
    # Each sum has one row per rank. A rank fills only its row, so the all-reduce gathers the rows.
    leaves = torch.zeros(world_size * len(local), dtype=torch.float64, device=device)
    own = [rows.view(world_size, -1)[rank] for rows in _split(leaves, lengths, world_size)]
    torch._foreach_copy_(own, local.split(lengths))
    vector = all_reduce_stats(torch.cat([counts, leaves]), group)
    counts, leaves = vector[: len(counts)], vector[len(counts) :]
    sums = pairwise_sums(_split(leaves, lengths, world_size))
    loss_and_weight, squares = sums[:2], sums[2:]
    return torch.cat([pairwise_sums([squares]), loss_and_weight, counts])


def _split(leaves: Tensor, lengths: Sequence[int], world_size: int) -> Sequence[Tensor]:
    return leaves.split([world_size * length for length in lengths])
